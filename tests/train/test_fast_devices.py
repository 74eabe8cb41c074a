"""What a GPU's speed asks for: epochs of many passes, and larger evaluation batches."""

from collections import Counter

import pytest
import torch

from trainkit import batches, data, options

CPU = torch.device("cpu")


@pytest.mark.parametrize("loader", ["resident", "workers"])
def test_an_epoch_of_more_images_than_there_are(loader: str) -> None:
    """Pass by pass, each in another order, alike on every rank, and from any step on."""
    count, size, batch = 24, 60, 6  # two passes and a half
    arguments = ["--train-size", str(size), "--batch-size", str(batch), "--loader", loader]
    opts = options.parse("", arguments)
    split = data.Split("numbers", torch.zeros(count, 1, 28, 28, dtype=torch.uint8), torch.arange(count))

    def seen(epoch: int, rank: int = 0, world_size: int = 1, first_step: int = 0) -> torch.Tensor:
        loaded = batches.training(split, opts, CPU, rank, world_size)
        loaded.set_epoch(epoch, first_step)
        return torch.stack([labels for _, labels in loaded])

    whole = seen(1)
    assert len(whole) == size // batch
    first, second, rest = whole.flatten().split(count)
    for one_pass in (first, second):
        assert one_pass.sort().values.tolist() == list(range(count))
    assert Counter(rest.tolist()).most_common(1)[0][1] == 1
    assert not torch.equal(first, second)
    assert not torch.equal(whole, seen(2))
    assert torch.equal(torch.cat([seen(1, rank, 2) for rank in (0, 1)], dim=1), whole)
    assert torch.equal(seen(1, first_step=7), whole[7:])


@pytest.mark.parametrize(
    ("device", "given", "size"), [("cpu", "", 250), ("cuda", "", 2500), ("cuda", "7", 7)]
)
def test_evaluation_batches_fit_the_device(
    device: str, given: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_make", lambda split, order, options, device: order)
    opts = options.parse("", ["--test-batch-size", given] if given else [])
    split = data.Split("numbers", torch.zeros(5000, 1), torch.zeros(5000))
    order = batches.testing(split, opts, torch.device(device))
    assert max(map(len, order)) == size
