"""Every option of every command: a new one is a decision, and has to be added here."""

import argparse
import runpy
import sys
from pathlib import Path

import lessons
import pytest
import torch
from conftest import REPOSITORY

from trainkit.training import sharded

OF_THE_STAGES = """
--batch-size --batch-size-per-gpu --checkpoint-dir --checkpoint-minutes --data-dir --dataset --debug
--dry-run --epochs --gamma --loader --lr --lr-scale --lr-warmup-images
--no-cuda --num-workers --patience --precision --recipe --results-dir --resume --save-model --seed --stop-at
--test-batch-size --test-size --timeout --train-size --width
"""
BEYOND = "03_multigpu_ddp/beyond"
# What each training has more than these.
TRAININGS = {
    "01_singlegpu/mnist_singlegpu.py": "",
    "01_singlegpu/which_precision.py": "",
    "02_multigpu_dp/by_hand.py": "--replicas",
    "02_multigpu_dp/mnist_multigpu.py": "",
    "03_multigpu_ddp/breakdown.py": "--by-hand --repeats --trace",
    "03_multigpu_ddp/mnist_ddp.py": "",
    f"{BEYOND}/by_feature/accumulate.py": "--accumulate",
    f"{BEYOND}/by_feature/batchnorm.py": "--norm",
    f"{BEYOND}/by_feature/best_epoch.py": "--validation",
    f"{BEYOND}/by_feature/by_hand.py": "--flat --forget",
    f"{BEYOND}/by_feature/by_hand_overlap.py": "--wait",
    f"{BEYOND}/by_feature/captured.py": "--compile --how",
    f"{BEYOND}/by_feature/fsdp.py": "--how",
    f"{BEYOND}/complete/gan.py": "",
    f"{BEYOND}/complete/gpt.py": """
        --bf16-residuals --checkpoint-activations --compile --context --heads --layers --shards
        --vocabulary""",
    f"{BEYOND}/complete/gpt_fsdp.py": """
        --bf16-residuals --checkpoint-activations --compile --context --heads --layers --shards
        --vocabulary""",
    f"{BEYOND}/complete/lightning/mnist_lightning.py": "",
    f"{BEYOND}/by_feature/loggers.py": "--logger",
    f"{BEYOND}/complete/lstm.py": "",
    f"{BEYOND}/by_feature/mixed_precision.py": "",
    f"{BEYOND}/by_feature/pipeline.py": "--micro-batches",
    f"{BEYOND}/complete/resnet.py": "--images --size",
    f"{BEYOND}/complete/tabular.py": "--accumulate --weights",
    f"{BEYOND}/by_feature/unused.py": "--graph",
    f"{BEYOND}/complete/vae_counts.py": "--graph",
}
PROGRAM = "--one-process-per-node --plain --python --when-requeued"
SUBMIT = f"--cpus-per-gpu --dry-run --gpus --local --nodes --partition --script --time --wait {PROGRAM}"
LOOP = "--batch-size --data-dir --epochs --num-workers"
PLAIN = f"{LOOP} --save-every"
OTHERS = {
    "01_singlegpu/plain.py": PLAIN,
    "01_singlegpu/fast.py": "--batch-size --data-dir --num-workers --steps --trace",
    "01_singlegpu/exercises/check.py": "",
    "01_singlegpu/submit.py": SUBMIT,
    "02_multigpu_dp/exercises/check.py": "",
    "02_multigpu_dp/submit.py": SUBMIT,
    "03_multigpu_ddp/exercises/check.py": "",
    "03_multigpu_ddp/plain_ddp.py": PLAIN,
    "03_multigpu_ddp/submit.py": SUBMIT,
    f"{BEYOND}/by_feature/own_loop.py": "--batch-size --data-dir --epochs --save-every",
    f"{BEYOND}/by_feature/recorded.py": PLAIN,
    "results/compare.py": "--batch-size --epochs --local --out --repeats --train-size --workers",
    "results/how_many_gpus.py": """
        --batch-size --budget --deadline --epochs --gpus --gpus-per-node --json --min-efficiency --out
        --price --set --target""",
    "results/plot_results.py": "--each --out --target",
    "slurm/experiments/looks_busy.py": "--no-cuda --seconds",
    "slurm/jobs.py": "--asked",
    "slurm/monitor.py": "--sample --verdict",
    "slurm/practice_cluster/cluster.py": """
        --bandwidth --conf --cpus --gpu-kind --gpus --mode --name --no-accounting --nodes --slurm""",
    "slurm/sweep.py": f"""
        {PROGRAM}
        --batch-size --budget --chdir --cpus-per-gpu --deadline --dry-run --epochs --gpus --gpus-per-node
        --loader --local --max-jobs --min-efficiency --num-workers --out --partition --repeats
        --scaling --script --stages --target --time --train-size --vary""",
    "tools/bench/bench.py": "--data-dir --out --repeats",
    "tools/bench/classic_mnist.py": "--csv --data-dir --epochs --stop-at",
    "tools/bench/gpt_ladder.py": "--cpu --out",
    "tools/bench/gpu/gpt_mfu.py": "--out --seconds --small",
    "tools/bench/gpu/one_gpu.py": "--compile-only --loss-steps --out --seconds --width",
    "tools/bench/gpu/overhead.py": "--data-dir --out --steps",
    "tools/bench/gpu/steps.py": "--compile-only --data-dir --kit-seconds --out --seconds",
    "tools/bench/gpu/timelines.py": "--out --width",
    "tools/bench/gpu/warmup.py": "--batches --data-dir --images --most --out",
    "tools/bench/ladder.py": "--data-dir --steps",
    "tools/bench/on_a_gpu.py": "--out",
    "tools/bench/predictions.py": "--laws --out",
    "tools/bench/published.py": "--out",
    "tools/bench/monitor_cost.py": "--data-dir --out",
    "trainkit/data/datasets.py": "--data-dir",
    "trainkit/doctor/checkup.py": "--data-dir --only-torch --results-dir",
    "trainkit/doctor/cli.py": f"--gpus --job --json --nodes --time --wait {PROGRAM}",
}
EVERY = {script: f"{OF_THE_STAGES} {more}" for script, more in TRAININGS.items()} | OTHERS
WITHOUT = {
    "slurm/doctor.py",  # starts trainkit/doctor/cli.py
    "slurm/practice_cluster/adopt.py",
    "slurm/practice_cluster/init.py",
    "trainkit/doctor/script_imports.py",  # started by the doctor
    "trainkit/jobs/in_job.py",  # asked by slurm/job_env.sh
    "trainkit/jobs/as_main.py",  # started by plain.py
    "trainkit/jobs/plain.py",  # started by the job scripts
    "03_multigpu_ddp/beyond/by_framework/train_accelerate.py",
    "03_multigpu_ddp/beyond/by_framework/train_hf_trainer.py",
    "03_multigpu_ddp/beyond/by_framework/train_hydra.py",
    "03_multigpu_ddp/beyond/by_framework/train_lightning.py",
    "trainkit/distributed/torchrun.py",  # torchrun's own
    "trainkit/workshop/learn.py",
    "tools/lessons.py",
    "tools/traces.py",
}


def test_every_command_is_listed() -> None:
    commands = {
        str(path.relative_to(REPOSITORY))
        for path in lessons.files("*.py", ":!tests", ":!0*/exercises/*/*")
        if '\nif __name__ == "__main__"' in path.read_text()
    }
    assert commands == {*EVERY} | WITHOUT


SPLIT_NETWORKS = ("fsdp.py", "gpt_fsdp.py", "pipeline.py")  # an older PyTorch cannot import what they need


class Listed(BaseException):
    """Raised where the command line would be read: the parser is complete."""


@pytest.mark.parametrize("script", EVERY)
def test_every_option_is_listed(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path(script).name in SPLIT_NETWORKS and torch.__version__ < sharded.NEEDED:
        pytest.skip(f"needs PyTorch {sharded.NEEDED} or newer")
    found, add = set(), argparse._ActionsContainer.add_argument

    def listing(self: argparse._ActionsContainer, *names: str, **how: object) -> argparse.Action:
        if how.get("help") != argparse.SUPPRESS:
            found.update(name for name in names if name.startswith("--") and name != "--help")
        return add(self, *names, **how)

    def parse(*_: object) -> None:
        raise Listed

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", listing)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.syspath_prepend((REPOSITORY / script).parent)
    with pytest.raises(Listed):
        runpy.run_path(str(REPOSITORY / script), run_name="__main__")
    assert found == {*EVERY[script].split()}
