"""Train the classic MNIST network with Lightning, on the same batches as mnist_ddp.py, with its record.

Try: torchrun --standalone --nproc-per-node=2 mnist_lightning.py --epochs 2
"""

import logging
import signal
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from manygpus import (
    DistEnv,
    Net,
    Options,
    Run,
    augmentation,
    build_optimizer,
    destroy_distributed,
    entrypoint,
    errors,
    eval_loader,
    evaluate,
    init_distributed,
    load_dataset,
    parse_options,
    resolve_precision,
    train_loader,
    tune_process,
)
from manygpus.data.loaders import Batch

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

    def __init__(self, opts: Options, dist_env: DistEnv) -> None:
        super().__init__()
        train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
        self.train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
        self.test_batches = eval_loader(test_set, opts, dist_env)
        self.net = Net(opts.width).to(dist_env.device, memory_format=torch.channels_last)
        self.autocast = torch.autocast(
            dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16"
        )
        self.optimizer, self.lr_scheduler = build_optimizer(opts, self.net, len(self.train_batches))
        stepped = self.net, self.optimizer, self.lr_scheduler
        self.run = Run("lightning", opts, dist_env, train_set, *stepped)
        self.run.resume()  # continues where an earlier run stopped
        self.epochs = self.run.epochs()
        self.epoch = next(self.epochs, None)
        self.on_sigterm = signal.getsignal(signal.SIGTERM)

    def configure_optimizers(self) -> dict:
        # By default, Lightning would step the schedule once per epoch.
        every_step = {"scheduler": self.lr_scheduler, "interval": "step"}
        return {"optimizer": self.optimizer, "lr_scheduler": every_step}

    def train_dataloader(self) -> "Steps":
        return Steps(self)

    def on_train_start(self) -> None:
        # Lightning has just set its own handler, which waits for the other ranks wherever the signal comes.
        signal.signal(signal.SIGTERM, self.on_sigterm)

    def on_train_epoch_start(self) -> None:
        self.train()

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        images, labels = batch
        with self.autocast:
            loss = F.nll_loss(self.net(images), labels)
        self.run.log(loss=loss)
        return loss  # Lightning then does zero_grad, backward and both steps

    def optimizer_step(self, epoch: int, step: int, optimizer: object, backward: Callable) -> None:
        backward()  # or Lightning calls it within `step`, and the rank's own time cannot be measured
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.run.end_of_epoch(self.epoch, evaluate(self.net, self.test_batches, F.nll_loss, self.autocast))
        self.epoch = next(self.epochs, None)
        self.trainer.should_stop = self.epoch is None  # also after --stop-at or --patience


class Steps:
    """The batches of an epoch, timed by `run`, which saves and stops between two of them."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def __len__(self) -> int:
        return len(self.training.train_batches) + 1  # `run.steps` ends when it is asked for one more

    def __iter__(self) -> Iterator[Batch]:
        yield from self.training.run.steps(self.training.epoch, self.training.train_batches)


class Ranks(LightningEnvironment):
    """Tells Lightning the rank that `init_distributed` found, however the processes were started."""

    creates_processes_externally = True

    def __init__(self, dist_env: DistEnv) -> None:
        super().__init__()
        self.dist_env = dist_env

    def global_rank(self) -> int:
        return self.dist_env.rank

    def local_rank(self) -> int:
        return self.dist_env.local_rank


@entrypoint
def main() -> None:
    # The log needs Lightning's warnings, but not its notes on GPUs, its limits and its makers' products.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")
    opts = parse_options(__doc__)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed + dist_env.rank)  # different dropout on each rank; DDP equalises the weights
    training = Training(opts, dist_env)
    ddp = DDPStrategy(
        parallel_devices=[dist_env.device] * dist_env.local_world_size,  # it takes the local rank's
        cluster_environment=Ranks(dist_env),
        gradient_as_bucket_view=True,
    )
    if training.epoch:
        # Most options switch off what `Run` already does. `should_stop` ends the training.
        Trainer(
            strategy=ddp,
            num_nodes=dist_env.num_nodes,
            max_epochs=-1,
            use_distributed_sampler=False,  # the batches are already split over the ranks
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(training)
    training.run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
