"""Scripts of frameworks as jobs: they save and come back by the frameworks' own means."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from checkout import Checkout
from conftest import BEYOND, ENVIRONMENT, rows_of, succeeded
from forking import Forking, forking
from safetensors.torch import load_file

FOLDER = BEYOND / "by_framework"
# The scripts of FOLDER, and where each saves its last step.
CHECKPOINTS = {
    "train_lightning": "last.ckpt",
    "train_accelerate": "step_100/model.safetensors",
    "train_hf_trainer": "checkpoint-100/model.safetensors",
    "train_hydra": "hydra/last.pt",
}
if torch.__version__ < "2.6":  # with which the Trainer refuses to resume
    del CHECKPOINTS["train_hf_trainer"]
STEPS = """
import os, select, signal
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = []
def after_each_step(*_):
    steps.append(1)
    at_step(len(steps))
register_optimizer_step_post_hook(after_each_step)
"""
# In the first start one rank gets the signal that comes before the time limit, or with a preemption.
IS_SIGNALLED = """
def at_step(step):
    if step == 25 and os.environ["RANK"] == "1" and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.NAME)
"""
SIGNALS = {"train_accelerate": "SIGTERM", "train_hf_trainer": "SIGUSR2", "train_hydra": "SIGTERM"}
# Of Lightning, which has a handler of its own for each signal, all ranks get both, from Slurm. A start stays
# where it is until one has come, but not the last one. The end of a loader worker is a signal, too.
STAYS = """
restart, (reads, writes) = int(os.environ.get("SLURM_RESTART_COUNT", "0")), os.pipe2(os.O_NONBLOCK)
signal.set_wakeup_fd(writes)
def at_step(step):
    if restart < 2 and step == (5, 15)[restart]:
        print(f"waits {restart} on rank {os.environ['RANK']}", flush=True)
        received = set()
        while not received & {signal.SIGUSR2, signal.SIGTERM}:
            select.select([reads], [], [])
            received |= set(os.read(reads, 100))
"""


def with_steps(script: Path, at_step: str) -> str:
    """Return the script with `at_step` behind its docstring, to be called after each step."""
    docstring, rest = re.fullmatch(r'(""".*?"""\n)(.*)', script.read_text(), re.DOTALL).groups()
    return docstring + STEPS + at_step + rest


def weights(job_folder: Path, name: str) -> dict[str, torch.Tensor]:
    path = job_folder / "checkpoints" / CHECKPOINTS[name]
    if path.suffix == ".safetensors":
        return load_file(path)
    saved = torch.load(path, weights_only=False)
    return saved["state_dict" if name == "train_lightning" else "model"]


def run(forks: Forking, script: Path, job_folder: Path) -> str:
    """Run the script in two ranks, and return what they have printed."""
    environment = dict.fromkeys(("MANYGPUS_JOB_DIR", "MANYGPUS_RESULTS_DIR"), str(job_folder))
    environment["LOCAL_WORLD_SIZE"] = "2"
    return succeeded(forks.run(script, env=ENVIRONMENT | environment, ranks=2)).stdout


def test_each_resumes_exactly_where_it_was_stopped(on_cluster: Checkout, tmp_path: Path) -> None:
    """As a job on two nodes, whose end is compared with that of a training in one go."""
    folder = on_cluster.folder / FOLDER.relative_to(BEYOND.parents[1])
    scripts = {name: folder / f"{name}.py" for name in CHECKPOINTS}
    modules = ("lightning.pytorch", "transformers.trainer", "accelerate", "hydra")
    with forking(tmp_path, ENVIRONMENT, modules) as forks:
        for name, script in scripts.items():
            run(forks, script, tmp_path / name)

    jobs = {}
    for name, script in scripts.items():
        planted = IS_SIGNALLED.replace("NAME", SIGNALS[name]) if name in SIGNALS else STAYS
        text = with_steps(script, planted)
        # PyTorch's threads abort some of the runs that went well, on CPUs that are shared.
        script.write_text(text.replace("    main()\n", "    main()\n    os._exit(0)\n"))
        # No GPU, so that all jobs run at the same time.
        asked = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--mem=1G")
        jobs[name] = on_cluster.submit("srun", "--plain", script, sbatch=asked)
    for start, name in enumerate(("TERM", "USR2")):
        for rank in range(2):
            on_cluster.wait_for(f"waits {start} on rank {rank}", jobs["train_lightning"])
        on_cluster.cluster.run(["scancel", f"--signal={name}", jobs["train_lightning"]])

    for name, job in jobs.items():
        state, log = on_cluster.cluster.wait(job, timeout=300), on_cluster.log(job)
        stops = set(map(int, re.findall("saved and stopped after step (.+)", log)))
        assert stops == ({30} if name in SIGNALS else {10, 30}), log
        assert state["JobState"] == "COMPLETED", log
        resumed = weights(on_cluster.folder / "results" / "jobs" / str(job), name)
        torch.testing.assert_close(resumed, weights(tmp_path / name, name), rtol=0, atol=0)


# As Lightning's users have it, with its own way back to the queue. The second start has nothing left to do.
ALONE = """
import os, time
import torch
from lightning.pytorch import LightningModule, Trainer

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        time.sleep(0.1)
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def on_train_epoch_end(self):
        print(f"trained until step {self.global_step}", flush=True)

def main():
    batches = torch.utils.data.DataLoader(torch.rand(64, 4), batch_size=8)
    steps = 1 if "SLURM_RESTART_COUNT" in os.environ else -1
    trainer = Trainer(max_steps=steps, max_epochs=-1, logger=False, enable_progress_bar=False)
    trainer.fit(Line(), batches)

main()
"""


def test_lightning_alone_comes_back_by_itself_on_one_gpu(on_cluster: Checkout) -> None:
    """As its log promises. The first save imports what the handler needs, so the signal comes after it."""
    script = on_cluster.folder / "mine" / "train.py"
    script.parent.mkdir()
    script.write_text(ALONE)
    sbatch = (f"--chdir={script.parent}", f"--output={on_cluster.folder}/plain-%j.log")
    job = on_cluster.submit("single", "--plain", script.name, sbatch=sbatch)
    on_cluster.wait_for("trained until step 16", job)
    on_cluster.cluster.run(["scancel", "--signal=USR2", job])
    state, log = on_cluster.cluster.wait(job, timeout=300), on_cluster.log(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), log
    assert re.search("Restored all states from .*/hpc_ckpt_1.ckpt", log), log


RECORDER = """
    from manygpus.training.recorder import Recorder
    arguments = {"batch_size": GLOBAL_BATCH_SIZE, "epochs": EPOCHS, "dataset": "random"}
    recorder = Recorder("accelerate", model, optimizer, **arguments)
    accelerator.register_for_checkpointing(recorder)
    step = 0
"""
EPOCH = """
        recorder.epoch(len(train_set) // accelerator.num_processes, 1.0, loss.item())
    accelerator.end_training()


"""


@pytest.mark.full
def test_accelerate_saves_our_record_with_the_rest(forking: Forking, tmp_path: Path) -> None:
    """Each epoch is in the record once, also when a signal comes at the end of one."""
    shutil.copy(FOLDER / "loader_workers.py", tmp_path)
    script = tmp_path / "recorded.py"
    text = (FOLDER / "train_accelerate.py").read_text()
    for line, code in {"    step = 0\n": RECORDER, "    accelerator.end_training()\n\n\n": EPOCH}.items():
        assert text.count(line) == 1
        text = text.replace(line, code)
    script.write_text(text)
    signalled = tmp_path / "signalled.py"
    signalled.write_text(with_steps(script, IS_SIGNALLED.replace("25", "15").replace("NAME", "SIGUSR2")))
    assert "saved and stopped after step 30" in run(forking, signalled, tmp_path / "job")
    assert "resumed after step 30" in run(forking, script, tmp_path / "job")
    assert [row["epoch"] for row in rows_of(tmp_path / "job")] == [1, 2, 3, 4, 5]
