"""Train the classic MNIST network by Lightning, as mnist_ddp.py does without: same batches, same record.

Try: torchrun --standalone --nproc-per-node=2 mnist_lightning.py --epochs 2
"""

import logging
import signal
import warnings
from collections.abc import Callable, Iterator

from trainkit.data import loaders as batches, datasets as data
from trainkit import errors
from trainkit.config import options
from trainkit.distributed import process_group
from trainkit.training.model import Net
from trainkit.training.run import Run
from trainkit.training.precision import choose_precision
from trainkit.training.evaluation import evaluate
from trainkit.training.optim import optimizer_and_schedule
from trainkit.data.loaders import Batch
from trainkit.config.options import Options
from trainkit.distributed.launchers import Place

import torch
import torch.nn.functional as F

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError as missing:
    errors.fail(
        f"Lightning is not installed here ({missing}): pip install -e '.[lightning]' in the top folder."
    )


class Training(LightningModule):
    """The loop of mnist_ddp.py, as the methods that Lightning calls."""

    def __init__(self, opts: Options, here: Place) -> None:
        super().__init__()
        train_set, test_set = data.load(opts.dataset, opts.data_dir)
        self.train_batches = batches.training(train_set, opts, here.device, here.rank, here.size)
        self.test_batches = batches.testing(test_set, opts, here.device, here.rank, here.size)
        self.net = Net(opts.width).to(here.device, memory_format=torch.channels_last)
        choose_precision(self.net, opts, train_set)
        self.optimizer, self.schedule = optimizer_and_schedule(opts, self.net, len(self.train_batches))
        stepped = self.net, self.optimizer, self.schedule
        self.run = Run("lightning", opts, here, train_set, *stepped, devices=here.size)
        self.epochs = self.run.epochs()  # goes on where an earlier run stopped
        self.epoch = next(self.epochs, None)
        self.on_sigterm = signal.getsignal(signal.SIGTERM)

    def configure_optimizers(self) -> dict:
        # Without "step" Lightning would call the schedule once per epoch.
        every_step = {"scheduler": self.schedule, "interval": "step"}
        return {"optimizer": self.optimizer, "lr_scheduler": every_step}

    def train_dataloader(self) -> "Steps":
        return Steps(self)

    def on_train_start(self) -> None:
        # Lightning's own, set a moment ago, waits for the other ranks, wherever the signal meets this one.
        signal.signal(signal.SIGTERM, self.on_sigterm)

    def on_train_epoch_start(self) -> None:
        self.train()

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        images, labels = batch
        loss = F.nll_loss(self.net(images), labels)
        self.run.add(loss)
        return loss  # Lightning does zero_grad, backward and both steps

    def optimizer_step(self, epoch: int, step: int, optimizer: object, backward: Callable) -> None:
        backward()  # otherwise Lightning calls it within `step`, and the rank's own time cannot be measured
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.run.end_of_epoch(self.epoch, evaluate(self.net, self.test_batches, F.nll_loss))
        self.epoch = next(self.epochs, None)
        self.trainer.should_stop = self.epoch is None  # also by --stop-at and --patience


class Steps:
    """The batches of an epoch, on the clock of `run`, which saves and stops between two of them."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def __len__(self) -> int:
        return len(self.training.train_batches) + 1  # asked for one more, `run.steps` comes to its end

    def __iter__(self) -> Iterator[Batch]:
        yield from self.training.run.steps(self.training.epoch, self.training.train_batches)


class Ranks(LightningEnvironment):
    """Gives Lightning this rank's place from process_group.join, whatever started the processes."""

    creates_processes_externally = True

    def __init__(self, here: Place) -> None:
        super().__init__()
        self.here = here

    def global_rank(self) -> int:
        return self.here.rank

    def local_rank(self) -> int:
        return self.here.local_rank


def main() -> None:
    # What it says of GPUs, of its limits and of its makers' products is no part of the log; warnings are.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")
    opts = options.parse(__doc__)
    here = process_group.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
    opts = opts.for_devices(here.size)
    torch.manual_seed(opts.seed + here.rank)  # each rank drops other neurons; DDP makes the weights equal
    training = Training(opts, here)
    ddp = DDPStrategy(
        parallel_devices=[here.device] * here.local_size,  # it takes that of the local rank
        cluster_environment=Ranks(here),
        gradient_as_bucket_view=True,
    )
    if training.epoch:
        # Most of it is to leave out what the run has already; `should_stop` ends it.
        Trainer(
            strategy=ddp,
            num_nodes=here.nodes,
            max_epochs=-1,
            use_distributed_sampler=False,  # the batches are shared out already
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(training)
    training.run.finish()
    process_group.leave()


if __name__ == "__main__":
    errors.run(main)
