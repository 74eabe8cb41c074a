"""Learning rate, batch and warm-up, counted in updates: many trainings of MNIST at a time on one GPU.

Try: PYTHONPATH=. python3 tools/bench/gpu/warmup.py --out /tmp/warmup.csv

The network, its data and its decay (0.7 per epoch) are those of the kit; fp32 in the weights, TF32 in the
layers. `--lr` is good at batch 64; the rule scales it to the batch; then it rises from 0 in the warm-up's
updates. The whole step is a CUDA graph that takes its batch and its learning rate from tables on the GPU, and
several trainings run beside each other, each on a stream. So accuracies and losses count here, and no speed;
dropout draws from one generator for all of them, so a training is not repeated to the last digit.
"""

import argparse
import gc
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measuring import DEVICE, Table, wait

from manygpus import Net, load_dataset, normalize
from manygpus.config.known_datasets import DEFAULT_DATA_DIR
from manygpus.data.loaders import DistributedBatchSampler
from manygpus.training.precision import set_float32_precision

COLUMNS = [
    "optimizer", "batch", "rule", "warmup", "warmup_updates", "seed", "images", "epochs", "updates", "lr",
    "gamma", "accuracy", "test_loss", "train_loss",
]  # fmt: skip
BASE_LR = {"SGD": 0.02, "AdamW": 0.001, "Adadelta": 1.0}  # at batch 64
BASE_BATCH = 64
RULES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # the exponent of batch / 64
WARMUPS = {"10 updates": (10, 0), "40 updates": (40, 0), "1 epoch": (0, 1), "3 epochs": (0, 3)}
BATCHES = (1024, 256, 4096, 64)
SEEDS = (1, 2, 3)
EPOCHS = 5
GAMMA = 0.7
AT_A_TIME = {64: 10, 256: 8, 1024: 6, 4096: 4}
EAGER_UPDATES = 3  # before the capture; they are real ones


class Training(NamedTuple):
    optimizer: str
    batch: int
    rule: str
    warmup: str
    seed: int
    images: int

    @property
    def updates_per_epoch(self) -> int:
        return self.images // self.batch

    @property
    def warmup_updates(self) -> int:
        updates, epochs = WARMUPS[self.warmup]
        return updates + epochs * self.updates_per_epoch

    @property
    def lr(self) -> float:
        """The learning rate of this batch after the warm-up, before any decay."""
        return BASE_LR[self.optimizer] * (self.batch / BASE_BATCH) ** RULES[self.rule]

    def learning_rates(self) -> list[float]:
        """Return that of every update."""
        rates = []
        for update in range(EPOCHS * self.updates_per_epoch):
            risen = min(1.0, (update + 1) / self.warmup_updates)
            rates.append(self.lr * risen * GAMMA ** (update // self.updates_per_epoch))
        return rates


def trainings(images: int, batches: list[int]) -> Iterator[Training]:
    """Yield all of them, batch by batch; a warm-up that is longer than the training is left out."""
    for batch in batches:
        for seed in SEEDS:
            for optimizer, rule, warmup in product(BASE_LR, RULES, WARMUPS):
                training = Training(optimizer, batch, rule, warmup, seed, images)
                if batch == BASE_BATCH and rule != "none":
                    continue  # no rule changes anything there
                if training.warmup_updates < EPOCHS * training.updates_per_epoch:
                    yield training


class Running:
    """One training, whose every update needs nothing from the CPU but a launch."""

    def __init__(self, training: Training, pixels: torch.Tensor, labels: torch.Tensor) -> None:
        self.training = training
        self._pixels = pixels
        self._labels = labels
        torch.manual_seed(training.seed)
        self.network = Net().to(DEVICE, memory_format=torch.channels_last).train()
        sampler = DistributedBatchSampler(training.images, training.batch, training.seed)
        orders = []
        for sampler.epoch in range(1, EPOCHS + 1):
            orders.append(sampler.indices().view(len(sampler), training.batch))
        self._order = torch.cat(orders).to(DEVICE)
        self._rates = torch.tensor(training.learning_rates(), device=DEVICE)
        self._lr = torch.zeros((), device=DEVICE)
        self._optimizer = self._make_optimizer()
        self._update = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.updates = len(self._order)
        self.losses = torch.zeros(self.updates, device=DEVICE)
        self._stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None

    def _make_optimizer(self) -> torch.optim.Optimizer:
        weights = self.network.parameters()
        on_gpu = DEVICE.type == "cuda"
        if self.training.optimizer == "SGD":
            return torch.optim.SGD(weights, self._lr, momentum=0.9, nesterov=True, fused=True)
        if self.training.optimizer == "AdamW":
            return torch.optim.AdamW(weights, self._lr, fused=True, capturable=on_gpu)
        return torch.optim.Adadelta(weights, self._lr, capturable=on_gpu, foreach=on_gpu)

    def _one_update(self) -> None:
        self._lr.copy_(self._rates.index_select(0, self._update).squeeze(0))
        indices = self._order.index_select(0, self._update).squeeze(0)
        images = normalize(self._pixels.index_select(0, indices))
        self._optimizer.zero_grad(set_to_none=True)
        loss = F.nll_loss(self.network(images), self._labels.index_select(0, indices))
        loss.backward()
        self._optimizer.step()
        self.losses.index_copy_(0, self._update, loss.detach().view(1))
        self._update.add_(1)

    def begin(self) -> None:
        """Make the first updates one by one, and capture the next."""
        if DEVICE.type == "cpu":
            for _ in range(EAGER_UPDATES):
                self._one_update()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(EAGER_UPDATES):
                self._one_update()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._one_update()

    def update(self) -> None:
        """Make the next update."""
        if self._graph is None:
            self._one_update()
            return
        with torch.cuda.stream(self._stream):
            self._graph.replay()

    @torch.no_grad()
    def test(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        """Return the accuracy in percent and the loss."""
        self.network.eval()
        right = torch.zeros((), device=DEVICE)
        loss = torch.zeros((), device=DEVICE)
        for some, labels_of_some in zip(images.split(2500), labels.split(2500), strict=True):
            output = self.network(some)
            right += (output.argmax(1) == labels_of_some).sum()
            loss += F.nll_loss(output, labels_of_some, reduction="sum")
        return 100 * right.item() / len(labels), loss.item() / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the CSV to write")
    parser.add_argument("--data-dir", type=Path, default=DEFAULT_DATA_DIR, help="where MNIST is")
    parser.add_argument(
        "--images", type=int, nargs="+", default=[20_000, 60_000], metavar="N",
        help="of an epoch, one size after the other (default: 20000 60000)",
    )  # fmt: skip
    parser.add_argument(
        "--batches", type=int, nargs="+", default=list(BATCHES), metavar="B", help="in this order"
    )
    parser.add_argument("--most", type=int, default=100_000, metavar="N", help="trainings of each size")
    args = parser.parse_args()
    table = Table(args.out, COLUMNS, printed=False)
    train_set, test_set = load_dataset("mnist", args.data_dir)
    pixels = train_set.inputs.to(DEVICE)
    labels = train_set.targets.to(DEVICE)
    test = normalize(test_set.inputs.to(DEVICE)), test_set.targets.to(DEVICE)
    set_float32_precision("tf32" if DEVICE.type == "cuda" else "fp32", DEVICE)
    for images in args.images:
        waiting = list(trainings(images, args.batches))[: args.most]
        print(f"{len(waiting)} trainings of {images} images", flush=True)
        while waiting:
            batch = waiting[0].batch
            group = [one for one in waiting if one.batch == batch][: AT_A_TIME[batch]]
            waiting = waiting[len(group) :]
            started = time.perf_counter()
            for row in train(group, pixels, labels, test):
                table.add(**row)
            print(f"{len(group)} of batch {batch}: {time.perf_counter() - started:.1f} s", flush=True)


def train(
    group: list[Training], pixels: torch.Tensor, labels: torch.Tensor, test: tuple[torch.Tensor, torch.Tensor]
) -> Iterator[dict[str, object]]:
    """Train all of one batch size beside each other; yield their rows."""
    running = [Running(one, pixels, labels) for one in group]
    for one in running:
        one.begin()
    for _ in range(EAGER_UPDATES, running[0].updates):
        for one in running:
            one.update()
    wait()
    for one in running:
        training = one.training
        accuracy, test_loss = one.test(*test)
        yield {
            **training._asdict(),
            "warmup_updates": training.warmup_updates,
            "epochs": EPOCHS,
            "updates": one.updates,
            "lr": round(training.lr, 6),
            "gamma": GAMMA,
            "accuracy": round(accuracy, 2),
            "test_loss": round(test_loss, 5),
            "train_loss": round(one.losses[-training.updates_per_epoch :].mean().item(), 5),
        }
    del running
    gc.collect()


if __name__ == "__main__":
    main()
