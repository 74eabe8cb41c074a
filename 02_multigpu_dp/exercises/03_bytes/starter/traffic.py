"""The bytes that DataParallel and DDP move in one step. Four gaps `...`."""

import torch
from torch import nn

from trainkit.training.model import Net


def bytes_of(tensor: torch.Tensor) -> int:
    return ...


def bytes_of_weights(model: nn.Module) -> int:
    return sum(bytes_of(weights) for weights in model.parameters())


# The first GPU of DataParallel, from the bytes of the weights, of the global batch, and of its outputs.
# A gradient has as many bytes as what it is the gradient of.
def sent(weights: int, images: int, outputs: int, gpus: int) -> float:
    return ...


def taken_in(weights: int, images: int, outputs: int, gpus: int) -> float:
    return ...


def all_reduced(weights: int, gpus: int) -> float:
    """Return what each GPU of DDP sends and receives."""
    return ...


def main() -> None:
    model = Net()
    batch = torch.zeros(256, 1, 28, 28)
    weights = bytes_of_weights(model)
    images = bytes_of(batch)
    outputs = bytes_of(model(batch))
    print(f"MB: {weights / 1e6:.1f} of weights, {images / 1e6:.1f} of images, {outputs / 1e6:.3f} of outputs")
    print("GPUs  DataParallel's first sends  takes in  each of DDP, both")
    for gpus in (2, 4, 8):
        first = [way(weights, images, outputs, gpus) / 1e6 for way in (sent, taken_in)]
        print(f"{gpus:4}  {first[0]:26.1f}  {first[1]:8.1f}  {all_reduced(weights, gpus) / 1e6:17.1f}")


if __name__ == "__main__":
    main()
