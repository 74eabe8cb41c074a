"""Train with the Hugging Face Trainer, in a job that saves and resumes after its limit or a preemption.

Try: torchrun --standalone --nproc-per-node=2 train_hf_trainer.py
"""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from loader_workers import obey_the_trainer
from torch.utils.data import DataLoader, Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

GLOBAL_BATCH_SIZE = 64
CHECK_STEPS = 10  # steps between two checks of whether any rank has been told to stop
# The job's folder, which stays the same when the job is requeued. Without a job, the current folder.
JOB = Path(os.environ.get("MANYGPUS_JOB_DIR", "."))
CHECKPOINTS = JOB / "checkpoints"


class Counting(Dataset):
    """Sequences of 16 tokens, each token the previous one plus 1."""

    def __len__(self) -> int:
        return 1280

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens}


def newest_whole_checkpoint() -> str | None:
    """Return the newest folder that contains the state, which the Trainer writes last."""
    saved = [path.parent for path in CHECKPOINTS.glob("checkpoint-*/trainer_state.json")]
    newest = max(saved, key=lambda folder: int(folder.name.removeprefix("checkpoint-")), default=None)
    return str(newest) if newest else None


class StopOnSignal(TrainerCallback):
    """Saves, and stops all ranks after the same step, when one of them received a signal."""

    def __init__(self) -> None:
        self.signals_received = []
        self.stopped = False
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, lambda number, _: self.signals_received.append(number))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if state.global_step % CHECK_STEPS:
            return
        received = torch.tensor(len(self.signals_received), device=args.device)
        if dist.is_initialized():
            dist.all_reduce(received)
        if received:
            self.stopped = control.should_save = control.should_training_stop = True


class ResumableTrainer(Trainer):
    """Sets the loader's `worker_init_fn`, for which the Trainer has no option."""

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        loader.base_dataloader.worker_init_fn = obey_the_trainer
        return loader


def main() -> None:
    set_seed(1)
    small = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        output_dir=str(CHECKPOINTS),
        per_device_train_batch_size=GLOBAL_BATCH_SIZE // int(os.environ["WORLD_SIZE"]),
        num_train_epochs=5,
        dataloader_num_workers=1,
        save_steps=50,
        save_total_limit=2,
        logging_strategy="epoch",
        report_to="none",  # by default it reports to every installed tracker, and trackers need internet
        disable_tqdm=True,  # a log is not a terminal
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
    )
    stop_on_signal = StopOnSignal()
    trainer = ResumableTrainer(model, arguments, train_dataset=Counting(), callbacks=[stop_on_signal])
    trainer.train(resume_from_checkpoint=newest_whole_checkpoint())
    if stop_on_signal.stopped and trainer.is_world_process_zero():
        print(f"saved and stopped after step {trainer.state.global_step}")
        (JOB / "stopped").touch()  # the job script sends the job back to the queue


if __name__ == "__main__":
    main()
