"""Train with Accelerate, in a job that saves and resumes after its time limit or a preemption.

Try: torchrun --standalone --nproc-per-node=2 train_accelerate.py
"""

import os
import shutil
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from loader_workers import obey_the_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 5
GLOBAL_BATCH_SIZE = 64
CHECK_STEPS = 10  # steps between two checks of whether any rank has been told to stop
SAVE_STEPS = 50
# The job's folder, which stays the same when the job is requeued. Without a job, the current folder.
JOB = Path(os.environ.get("MANYGPUS_JOB_DIR", "."))
CHECKPOINTS = JOB / "checkpoints"


def newest_checkpoint() -> Path | None:
    return max(CHECKPOINTS.glob("step_*"), key=lambda path: int(path.name[5:]), default=None)


def save(accelerator: Accelerator, step: int) -> None:
    """Save the whole state as `step_N`. If the process is killed meanwhile, the previous one stays intact."""
    before = newest_checkpoint()
    accelerator.save_state(CHECKPOINTS / "unfinished")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (CHECKPOINTS / "unfinished").rename(CHECKPOINTS / f"step_{step}")
        if before:
            shutil.rmtree(before)
    accelerator.wait_for_everyone()


def main() -> None:
    signals_received = []
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals_received.append(number))
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        # A resumed epoch keeps its order of samples. GLOBAL_BATCH_SIZE is split into the ranks' shards.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, split_batches=True),
    )
    set_seed(1)
    features = torch.randn(1280, 20)
    train_set = TensorDataset(features, (features[:, 0] > features[:, 1]).long())
    train_loader = DataLoader(
        train_set, GLOBAL_BATCH_SIZE, shuffle=True, num_workers=1, worker_init_fn=obey_the_trainer
    )
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    step = 0
    if checkpoint := newest_checkpoint():
        accelerator.load_state(checkpoint)
        step = int(checkpoint.name[5:])
        accelerator.print(f"resumed after step {step}")

    first_epoch, steps_done = divmod(step, len(train_loader))
    for epoch in range(first_epoch, EPOCHS):
        train_loader.set_epoch(epoch)
        batches = train_loader
        if epoch == first_epoch:
            batches = accelerator.skip_first_batches(train_loader, steps_done)
        for features, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(features), labels)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if signals_received:
                accelerator.set_trigger()
            within_epoch = step % len(train_loader) > 0  # a stop at its end would skip what follows
            # `check_trigger` is true on all ranks, or on none.
            stop = within_epoch and step % CHECK_STEPS == 0 and accelerator.check_trigger()
            if stop or step % SAVE_STEPS == 0:
                save(accelerator, step)
            if stop:
                accelerator.print(f"saved and stopped after step {step}")
                if accelerator.is_main_process:
                    (JOB / "stopped").touch()  # the job script sends the job back to the queue
                accelerator.end_training()
                return
        accelerator.print(f"epoch {epoch + 1}: loss {loss:.6f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
