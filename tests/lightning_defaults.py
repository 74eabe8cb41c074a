"""What Lightning does where it is not told otherwise, in numbers: two ranks print them as a line of JSON.

usage: lightning_defaults.py FOLDER, for what it writes by itself. `mnist_lightning` has to be importable.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from mnist_lightning import Ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import world

TRAIN, TEST, BATCH = 640, 1001, 32
STEPS = TRAIN // BATCH // 2  # of an epoch, as each of two ranks takes BATCH images
RIGHT = TEST // 2  # the network is right about the first RIGHT test images, and no others


def images(count: int) -> TensorDataset:
    """Each is its own number."""
    return TensorDataset(torch.arange(count))


class Watched(LightningModule):
    """Takes note of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.trained_on, self.tested_on = [], []

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=STEPS, gamma=0.7)]

    def on_validation_epoch_start(self) -> None:
        self.tested_on = []

    def on_train_start(self) -> None:
        self.batches_before = len(self.tested_on)

    def training_step(self, batch: list, _: int) -> torch.Tensor:
        self.trained_on.append(batch[0])
        loss = self.layer(batch[0][:, None] / TRAIN).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list, _: int) -> None:
        self.tested_on.append(batch[0])
        right = 100 * (batch[0] < RIGHT).float()
        how = {"batch_size": len(right)}
        self.log("by_rank", right.mean(), **how)
        self.log("by_mean", right.mean(), sync_dist=True, **how)
        self.log("by_sum", right.sum() / TEST, sync_dist=True, reduce_fx="sum", **how)

    def on_validation_epoch_end(self) -> None:
        print("told by print")
        self.print("told by self.print")


def trainer(here: world.World, folder: Path, **told: object) -> Trainer:
    ddp = DDPStrategy(parallel_devices=[here.device] * here.size, cluster_environment=Ranks(here))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    return Trainer(strategy=ddp, max_epochs=1, **quiet, **told)


def main() -> None:
    warnings.simplefilter("ignore")
    folder, here = Path(sys.argv[1]), world.join(use_cuda=False, timeout=60)
    found: dict[str, object] = {}

    seed_everything(1)
    masks = world.gather((F.dropout(torch.ones(1000)) > 0).tolist())
    found["seed_everything"] = sum(a == b for a, b in zip(*masks, strict=True))

    network, asked, broadcast = Watched(), [], dist.broadcast
    with_defaults = trainer(here, folder)

    def counted(*args: object, **how: object) -> object:
        asked.append(with_defaults.training)
        return broadcast(*args, **how)

    dist.broadcast = counted
    with_defaults.fit(
        network, DataLoader(images(TRAIN), BATCH, shuffle=True), DataLoader(images(TEST), BATCH)
    )
    dist.broadcast = broadcast
    found["images_of_a_step"] = sum(world.gather(len(network.trained_on[0])))
    # Of both ranks, as many as one device takes at a time.
    first = sum(world.gather(network.trained_on[0][: BATCH // 2].tolist()), [])
    torch.manual_seed(1)
    (of_one,) = next(iter(DataLoader(images(TRAIN), BATCH, shuffle=True)))
    found["also_in_the_first_batch_of_one"] = len({*first} & {*of_one.tolist()})
    tested = world.gather(torch.cat(network.tested_on).tolist())
    found["tested"] = sum(map(len, tested))
    found["batches_tested_before"] = network.batches_before
    found["rate"] = round(with_defaults.optimizers[0].param_groups[0]["lr"], 6)
    found["broadcasts"] = sum(asked)
    found["logged"] = sum("train_loss" in path.read_text() for path in folder.rglob("metrics.csv"))
    found["checkpoints"] = len(list(folder.rglob("*.ckpt")))

    shares = torch.arange(TEST).tensor_split([RIGHT])[here.rank]
    told = {"use_distributed_sampler": False, "logger": False, "enable_checkpointing": False}
    with_shares = trainer(here, folder, **told)
    with_shares.validate(Watched(), DataLoader(TensorDataset(shares), 250), verbose=False)
    metrics = {name: round(value.item(), 2) for name, value in with_shares.callback_metrics.items()}
    found["by_rank"] = [of_rank["by_rank"] for of_rank in world.gather(metrics)]
    found |= {"by_mean": metrics["by_mean"], "by_sum": metrics["by_sum"]}

    by_fours = trainer(here, folder, accumulate_grad_batches=4, **told)
    by_fours.fit(Watched(), DataLoader(images(TRAIN // 2), BATCH))
    found["updates"] = by_fours.global_step
    if here.rank == 0:
        print(json.dumps(found))
    world.leave()


if __name__ == "__main__":
    main()
