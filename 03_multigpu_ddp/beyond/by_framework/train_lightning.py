"""Train with Lightning, in a job that saves and resumes after its time limit or a preemption.

Try: torchrun --standalone --nproc-per-node=2 train_lightning.py
"""

import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from loader_workers import obey_the_trainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 5
GLOBAL_BATCH_SIZE = 64
CHECK_STEPS = 10  # steps between two checks of whether any rank has been told to stop
SAVE_STEPS = 50
# The job's folder, which stays the same when the job is requeued. Without a job, the current folder.
JOB = Path(os.environ.get("MANYGPUS_JOB_DIR", "."))
CHECKPOINT = JOB / "checkpoints" / "last.ckpt"


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        features, labels = batch
        loss = F.cross_entropy(self.layers(features), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class ResumableLoader(DataLoader):
    """A loader whose position in the epoch is part of Lightning's checkpoint."""

    batches_done = 0

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        self.batches_done %= len(self)  # after a whole epoch, the next one begins
        for batch in islice(super().__iter__(), self.batches_done, None):
            self.batches_done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"batches_done": self.batches_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches_done = state["batches_done"]


class SaveAndStop(Callback):
    """Saves every SAVE_STEPS steps, and stops all ranks after the same step when one received a signal."""

    def __init__(self) -> None:
        self.signals_received = []
        self.stopped = False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        for number in (signal.SIGUSR2, signal.SIGTERM):  # Lightning has set its own SIGTERM handler by now
            signal.signal(number, lambda number, _: self.signals_received.append(number))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: object) -> None:
        if trainer.global_step % CHECK_STEPS == 0:
            received = bool(self.signals_received)
            self.stopped = trainer.strategy.reduce_boolean_decision(received, all=False)
        if self.stopped or trainer.global_step % SAVE_STEPS == 0:
            trainer.save_checkpoint(CHECKPOINT, weights_only=False)
        trainer.should_stop = self.stopped

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero and not self.stopped:
            loss = trainer.callback_metrics["loss"]
            print(f"epoch {trainer.current_epoch + 1}: loss {loss:.6f}", flush=True)


def main() -> None:
    seed_everything(1)
    world_size = int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    features = torch.randn(1280, 20)
    train_set = TensorDataset(features, (features[:, 0] > features[:, 1]).long())
    sampler = DistributedSampler(train_set, world_size, int(os.environ["RANK"]))
    train_loader = ResumableLoader(
        train_set,
        GLOBAL_BATCH_SIZE // world_size,
        sampler=sampler,
        num_workers=1,
        worker_init_fn=obey_the_trainer,
    )
    save_and_stop = SaveAndStop()
    trainer = Trainer(
        devices=local_world_size,  # Lightning compares this with Slurm's variables
        num_nodes=world_size // local_world_size,
        max_epochs=EPOCHS,
        callbacks=[save_and_stop],
        enable_checkpointing=False,  # the callback saves
        use_distributed_sampler=False,  # the loader already has one
        enable_progress_bar=False,  # a log is not a terminal
        logger=False,
    )
    resumes = CHECKPOINT.exists()
    trainer.fit(Classifier(), train_loader, ckpt_path=CHECKPOINT if resumes else None)
    if save_and_stop.stopped and trainer.is_global_zero:
        print(f"saved and stopped after step {trainer.global_step}")
        (JOB / "stopped").touch()  # the job script sends the job back to the queue


if __name__ == "__main__":
    main()
