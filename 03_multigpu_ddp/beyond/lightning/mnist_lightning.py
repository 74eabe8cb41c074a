"""Train the classic MNIST network by Lightning, as mnist_ddp.py does without: same batches, same record.

Try: torchrun --standalone --nproc-per-node=2 mnist_lightning.py --epochs 2
"""

import logging
import sys
import warnings
from argparse import ArgumentError, ArgumentTypeError
from dataclasses import fields
from pathlib import Path

from trainkit import batches, data, errors, options, world
from trainkit.errors import UserError
from trainkit.model import Net
from trainkit.options import Options
from trainkit.precision import choose_precision, precision_of, set_precision
from trainkit.recipes import optimizer_and_schedule
from trainkit.world import World

import torch
import torch.nn.functional as F

try:
    import jsonargparse  # noqa: F401  without it LightningCLI would fail later, in other words
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
except ModuleNotFoundError as missing:
    errors.fail(
        f"Lightning is not installed here ({missing}): pip install -e '.[lightning]' in the top folder."
    )

from record import RecordRun, check_readable

COMMANDS = tuple(LightningCLI.subcommands())  # fit, validate, test, predict
# Options of Lightning that would be overruled, or make the record wrong, and their defaults.
DECIDED = {"accelerator": "auto", "strategy": "auto", "devices": "auto", "num_nodes": 1}
DECIDED |= {"max_epochs": None, "precision": None, "accumulate_grad_batches": 1}


class Classifier(LightningModule):
    """The network of the stages, with its step and its optimizer."""

    def __init__(self, opts: Options) -> None:
        super().__init__()
        self.opts = opts
        self.net = Net(opts.width).to(memory_format=torch.channels_last)

    def setup(self, stage: str) -> None:
        self.net.to(self.device)  # Lightning would only do it later
        choose_precision(self.net, self.opts, self.trainer.datamodule.train_set)

    def configure_optimizers(self) -> dict:
        steps = len(self.trainer.datamodule.train_batches)
        optimizer, schedule = optimizer_and_schedule(self.opts, self.net, steps)
        # Without "step" Lightning would call it once per epoch.
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: batches.Batch, _: int) -> torch.Tensor:
        images, labels = batch
        return F.nll_loss(self.net(images), labels)  # Lightning does zero_grad, backward and both steps

    def validation_step(self, batch: batches.Batch, _: int) -> None:
        images, labels = batch
        output = self.net(images)
        loss = F.nll_loss(output, labels, reduction="sum")
        right = output.argmax(1).eq(labels).float().sum()
        # Sums, over all ranks (sync_dist): Lightning's means are wrong where ranks have unequal shares.
        sums = {"sum_of_losses": loss, "right": right, "images": float(len(labels))}
        self.log_dict(sums, reduce_fx="sum", sync_dist=True, batch_size=len(labels))

    test_step = validation_step

    def predict_step(self, batch: batches.Batch, _: int) -> torch.Tensor:
        return self.net(batch[0]).argmax(1)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["net"] = {"precision": precision_of(self.net), "width": self.opts.width}

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        precision, width = checkpoint["net"].values()
        if width != self.opts.width:
            raise UserError(f"the checkpoint was made with --width {width}: give the same.")
        if self.opts.precision == "auto":  # as the run chose at its start, whatever is faster today
            set_precision(self.net, precision)


class Images(LightningDataModule):
    """This rank's share of the batches of the stages; the test set is shared out without padding."""

    def __init__(self, opts: Options, here: World) -> None:
        super().__init__()
        self.opts, self.place = opts, (here.device, here.rank, here.size)

    def setup(self, stage: str) -> None:
        self.train_set, self.test_set = data.load(self.opts.dataset, self.opts.data_dir)
        _, _, ranks = self.place
        if (self.opts.test_size or ranks) < ranks:  # who has no test image logs nothing, and is waited for
            raise UserError(
                f"--test-size {self.opts.test_size} is less than the {ranks} processes: raise it."
            )
        if stage == "fit":
            self.train_batches = batches.training(self.train_set, self.opts, *self.place)

    def train_dataloader(self) -> batches.Batches:
        return self.train_batches

    def val_dataloader(self) -> batches.Batches:
        return batches.testing(self.test_set, self.opts, *self.place)

    test_dataloader = predict_dataloader = val_dataloader


class Ranks(LightningEnvironment):
    """Tells Lightning who this rank is: what trainkit.world found out, whoever started the processes."""

    creates_processes_externally = True

    def __init__(self, here: World) -> None:
        super().__init__()
        self.here = here

    def global_rank(self) -> int:
        return self.here.rank

    def local_rank(self) -> int:
        return self.here.local_rank

    def teardown(self) -> None:
        """Leave WORLD_SIZE in the environment, which Lightning would take out."""


class CommandLine(LightningCLI):
    """Lightning's options and those of the stages, from the command line or from YAML. Making it runs it."""

    def __init__(self) -> None:
        strict = {"exit_on_error": False, "allow_abbrev": False}
        always = {"default_config_files": [str(Path(__file__).with_name("config.yaml"))]}
        super().__init__(
            LightningModule,
            LightningDataModule,
            save_config_callback=None,
            seed_everything_default=False,
            auto_configure_optimizers=False,
            parser_kwargs=strict | dict.fromkeys(COMMANDS, strict | always),
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        options.declare(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: None) -> None:
        try:
            super().parse_arguments(parser, args)
        except (ArgumentError, ArgumentTypeError) as error:
            raise UserError(f"{' '.join(str(error).split())}. See --help.") from None
        self.asked = self.config[self.config.subcommand]
        for name, default in DECIDED.items():
            if self.asked.trainer[name] != default:
                raise UserError(
                    f"trainer.{name} is decided by what starts the processes, and by options of the stages "
                    "(--epochs, --precision, --no-cuda): leave it out."
                )
        if self.asked.ckpt_path:
            check_readable(Path(self.asked.ckpt_path))  # here, as Lightning reads it next

    def before_instantiate_classes(self) -> None:
        opts = options.completed({one.name: self.asked[one.name] for one in fields(Options)})
        self.here = world.join(not opts.no_cuda, opts.timeout, opts.debug_dir)
        self.opts = opts.for_devices(self.here.size)
        self.record = RecordRun(self.opts, self.here)
        self.trainer_defaults["callbacks"] = [self.record]

    def instantiate_trainer(self) -> Trainer:
        here = self.here
        ddp = DDPStrategy(
            parallel_devices=[here.device] * here.local_size,  # the one that is taken is the local rank's
            cluster_environment=Ranks(here),
            gradient_as_bucket_view=True,
        )
        return super().instantiate_trainer(strategy=ddp, num_nodes=here.nodes, max_epochs=self.opts.epochs)

    def after_instantiate_classes(self) -> None:
        # Each rank drops other neurons; DDP makes the weights equal.
        torch.manual_seed(self.opts.seed + self.here.rank)
        self.model, self.datamodule = Classifier(self.opts), Images(self.opts, self.here)

    def before_fit(self) -> None:
        if newest := self.record.open_folder():
            self.config_init.fit.ckpt_path = newest

    def after_fit(self) -> None:
        self.record.finish(self.model.net)


def main() -> None:
    if sys.argv[1:2] not in [[name] for name in COMMANDS]:
        sys.argv.insert(1, "fit")  # the command line of a stage
    # What it says of GPUs, of its limits and of its makers' products is no part of the log; warnings are.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Of its own code, which no user can mend.
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")
    try:
        CommandLine()
    except MisconfigurationException as error:
        raise UserError(f"Lightning refuses this: {errors.first_line(error)}") from None
    world.leave()


if __name__ == "__main__":
    errors.run(main)
