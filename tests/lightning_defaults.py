"""What Lightning does by default, in numbers: two ranks print them as a line of JSON.

`mnist_lightning` has to be importable.
"""

import json
import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from mnist_lightning import Ranks
from torch.utils.data import DataLoader, TensorDataset

from manygpus.distributed import process_group
from manygpus.distributed.process_group import destroy_distributed

TRAIN, TEST, BATCH = torch.arange(640), torch.arange(1001), 32  # each image is its own number
STEPS = len(TRAIN) // BATCH // 2  # of an epoch, as each of two ranks takes BATCH images
RIGHT = len(TEST) // 2  # the network is right about the first RIGHT test images, and no others


class Watched(LightningModule):
    """Takes note of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained_on, self.tested_on = [], []

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=STEPS, gamma=0.7)]

    def training_step(self, batch: list, _: int) -> torch.Tensor:
        self.trained_on.append(batch[0])
        return self.layer(batch[0][:, None] / len(TRAIN)).square().mean()

    def validation_step(self, batch: list, _: int) -> None:
        self.tested_on.append(batch[0])
        right, settings = 100 * (batch[0] < RIGHT).float(), {"batch_size": len(batch[0])}
        self.log("by_rank", right.mean(), **settings)
        self.log("by_mean", right.mean(), sync_dist=True, **settings)
        self.log("by_sum", right.sum() / len(TEST), sync_dist=True, reduce_fx="sum", **settings)


def batches(images: torch.Tensor) -> DataLoader:
    return DataLoader(TensorDataset(images), BATCH)


def main() -> None:
    warnings.simplefilter("ignore")
    dist_env = process_group.init_distributed(use_gpu=False, timeout_seconds=60)
    seed_everything(1)
    masks = process_group.gather((F.dropout(torch.ones(1000)) > 0).tolist())

    def trainer(**arguments: object) -> Trainer:
        ddp = DDPStrategy(
            parallel_devices=[dist_env.device] * dist_env.world_size, cluster_environment=Ranks(dist_env)
        )
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        return Trainer(strategy=ddp, max_epochs=1, **quiet, **arguments)

    with_defaults, network = trainer(num_sanity_val_steps=0), Watched()
    with_defaults.fit(network, batches(TRAIN), batches(TEST))
    shares = trainer(use_distributed_sampler=False)
    shares.validate(Watched(), batches(TEST.tensor_split([RIGHT])[dist_env.rank]), verbose=False)
    metrics = process_group.gather(
        {name: round(value.item(), 2) for name, value in shares.callback_metrics.items()}
    )
    numbers = {
        "images_of_a_step": sum(process_group.gather(len(network.trained_on[0]))),
        "tested": sum(process_group.gather(sum(map(len, network.tested_on)))),
        "by_rank": [of_rank["by_rank"] for of_rank in metrics],
        "by_mean": metrics[0]["by_mean"],
        "by_sum": metrics[0]["by_sum"],
        "rate": round(with_defaults.optimizers[0].param_groups[0]["lr"], 6),
        "seed_everything": sum(a == b for a, b in zip(*masks, strict=True)),
    }
    if dist_env.rank == 0:
        print(json.dumps(numbers))
    destroy_distributed()


if __name__ == "__main__":
    main()
