"""Generated digits of MNIST's shape, for machines without MNIST: fit to measure speed, not accuracy."""

import torch
import torch.nn.functional as F

# Ten digits of 5 x 7 dots.
_FONT = """
.###. ..#.. .###. .###. ...#. ##### .###. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... #.... ....# #...# #...#
#..## ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# ..#.. #...# ....#
.###. .###. ##### .###. ...#. .###. .###. ..#.. .###. .###.
"""


def digits(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw images, uint8 (n, 1, 28, 28), and labels, int64 (n,), determined by the seed.

    The digits vary in size, place and brightness, under noise.
    """
    rows = [line.split() for line in _FONT.strip().splitlines()]
    font = torch.tensor([[[dot == "#" for dot in row[digit]] for row in rows] for digit in range(10)])
    variants = []
    for height, width in ((20, 15), (20, 11), (16, 15), (16, 11)):
        glyphs = F.interpolate(font.unsqueeze(1).float(), (height, width), mode="bilinear")
        left, top = (36 - width) // 2, (36 - height) // 2
        canvas = F.pad(glyphs, (left, 36 - width - left, top, 36 - height - top))
        shifted = canvas.unfold(2, 28, 1).unfold(3, 28, 1).reshape(10, -1, 28, 28)  # by -4..4 pixels
        variants += [(shifted * brightness).round().byte() for brightness in (50, 75, 100, 150)]
    bank = torch.cat(variants, dim=1)

    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=random)
    variant = torch.randint(bank.shape[1], (n,), generator=random)
    noise = torch.randint(80, (n, 1, 28, 28), dtype=torch.uint8, generator=random)
    return bank[labels, variant].unsqueeze(1).add_(noise), labels  # 150 + 79: no overflow
