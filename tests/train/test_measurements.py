"""What is measured and how ranks are started: promises that no other test would see broken."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkout import SCRIPTS, Checkout
from cluster import RunningCluster
from conftest import Script, places, rows_of, succeeded, weights_of

from trainkit import devices as device
from trainkit.compare import comparison
from trainkit.distributed import process_group
from trainkit.training import clock
from trainkit.training.model import Dropout

SMALL = ("--train-size", 128, "--test-size", 101, "--batch-size", 64, "--width", 4, "--precision", "fp32")


# --- what N ranks record ----------------------------------------------------------------------------

# Every look at a rank's clock finds it so many seconds later than the look before.
SECONDS, MEMORY = (10, 32), (500, 700)
PLANTED = f"""
import itertools, types
from trainkit.training import run
from trainkit.training import clock

def measure(rank):
    ticks = itertools.count(0, {SECONDS}[rank])
    clock.time = types.SimpleNamespace(perf_counter=lambda: next(ticks))
    run.peak_memory_mb = lambda device: {MEMORY}[rank]
"""


@pytest.fixture(scope="module")
def two_ranks(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two ranks, the second of them slower and fuller, and at the end of the epoch of each its
    weights and what its dropout makes of ones."""
    place = Checkout(tmp_path_factory.mktemp("two-ranks") / "a checkout")
    place.script("ddp").with_name("planted.py").write_text(PLANTED)
    place.insert("ddp", "import planted; planted.measure(here.rank)", before="torch.manual_seed(")
    state = "(model.module.state_dict(), model.module.dropout1(torch.ones(1000)))"
    save = f"torch.save({state}, opts.results_dir / f'rank-{{here.rank}}.pt')"
    place.insert("ddp", save, before="run.end_of_epoch(")
    succeeded(script(place.script("ddp"), *SMALL, "--epochs", 1, "--results-dir", place.folder, ranks=2))
    return place.folder


def test_times_and_memory_are_those_of_the_slowest_and_the_fullest_rank(two_ranks: Path) -> None:
    (row,) = rows_of(two_ranks)
    assert (row["train_seconds"], row["eval_seconds"], row["peak_memory_mb"]) == (32, 32, 700)
    assert row["images_per_s"] == row["images"] / 32 == 4


def test_peak_memory_is_that_of_the_epoch(script: Script, tmp_path: Path, checkout: Checkout) -> None:
    """A GPU holds 700 MB in a step of the warm-up, when cuDNN tries out what is fastest, then 300."""
    reset = "run.reset_peak_memory = lambda: peak.append(0)"
    ask = "run.peak_memory_mb = lambda device: peak[-1]"
    checkout.plant("single", f"from trainkit.training import run; peak = [900]; {reset}; {ask}")
    hold = "peak[-1] = max(peak[-1], 700 if epoch == 1 else 300)"
    checkout.insert("single", hold, before="optimizer.zero_grad()")
    results = tmp_path / "results"
    succeeded(script(checkout.script("single"), *SMALL, "--epochs", 3, "--results-dir", results))
    assert [row["peak_memory_mb"] for row in rows_of(results)] == [700, 300, 300]
    for epochs, peak in ((3, 300), (1, 700)):
        rows, _ = comparison.load([results])
        (largest,) = comparison.summarize(rows[rows.epoch <= epochs]).peak_memory_mb
        assert largest == peak  # that of the warm-up only where there is nothing else


def test_ranks_drop_other_neurons_and_keep_equal_weights(two_ranks: Path) -> None:
    (weights, dropped), (other_weights, other_dropped) = (
        torch.load(two_ranks / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1)
    )
    assert not torch.equal(dropped, other_dropped)
    for name, values in weights.items():
        assert torch.equal(values, other_weights[name]), name


def test_a_gpus_queue_is_empty_when_its_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended GPU the work is done, and not merely queued, at both ends."""
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("waited"))
    look = SimpleNamespace(perf_counter=lambda: seen.append("looked") or len(seen))
    monkeypatch.setattr(clock, "time", look)
    device = torch.device("cuda", 0)
    assert clock.stop(device, clock.start(device)) == 2
    assert seen == ["waited", "looked"] * 2


TWO_NODES = {
    "srun": {"SLURM_STEP_NUM_TASKS": 4, "SLURM_STEP_NUM_NODES": 2, "SLURM_PROCID": 3, "SLURM_LOCALID": 1},
    "torchrun": {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2},
}
TWO_NODES["torchrun"]["TORCHELASTIC_RUN_ID"] = "none"


@pytest.mark.parametrize("launcher", TWO_NODES)
def test_a_rank_counts_over_all_nodes_and_its_gpu_on_its_own(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of two ranks on each of two nodes, as if it had two GPUs and met the others."""
    met = []
    for name, value in (TWO_NODES[launcher] | {"MASTER_ADDR": "n1", "MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device, "try_gpu", lambda device: met.append(device.index))
    monkeypatch.setattr(process_group, "card", lambda device: "")
    store = torch.distributed.HashStore()  # the others have come
    named = "torchrun none, 4 processes" if launcher == "torchrun" else "4 processes"
    for key, value in {"training": named, "card of 0": "", "card of 1": "", "card of 2": ""}.items():
        store.set(key, value)
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *_, **__: iter([(store, 3, 4)]))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **how: met.append(how["rank"]))
    here = process_group.join(use_cuda=True, timeout=30)
    assert (here.rank, here.local_rank, here.size, here.nodes) == (3, 1, 4, 2)
    assert met == [1, 3]
    assert here.device == torch.device("cuda", 1)


# --- what a process computes ------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.25, 0.5])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_dropout_keeps_the_mean(p: float, layout: torch.memory_format) -> None:
    """A share p of the elements is dropped, and the others grow by 1 / (1 - p): as nn.Dropout does."""
    torch.manual_seed(1)
    dropout, ones = Dropout(p), torch.ones(100, 64, 12, 12).to(memory_format=layout)
    once, again = dropout(ones), dropout(ones)
    assert once.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    assert (once == 0).float().mean().item() == pytest.approx(p, abs=0.002)  # four standard deviations
    assert once.mean().item() == pytest.approx(1, abs=0.005)
    assert not torch.equal(once, again)
    assert torch.equal(dropout.eval()(ones), ones)


def test_the_seed_decides_on_the_weights(script: Script, tmp_path: Path) -> None:
    """In every stage the same. They hardly move at this learning rate, whatever the order of the images."""
    weights = {}
    for stage, seed in (("single", 7), ("dp", 7), ("ddp", 7), ("single", 8)):
        folder = tmp_path / f"{stage}-{seed}"
        arguments = (*SMALL, "--epochs", 1, "--lr", 1e-30, "--seed", seed, "--save-model")
        succeeded(script(stage, *arguments, "--results-dir", folder))
        weights[stage, seed] = weights_of(folder)["conv1.weight"]
    assert torch.equal(weights["single", 7], weights["dp", 7])
    assert torch.equal(weights["single", 7], weights["ddp", 7])
    assert not torch.equal(weights["single", 7], weights["single", 8])


def test_the_clock_of_a_run_goes_on_and_every_process_warms_up(script: Script, tmp_path: Path) -> None:
    assert script("single", *SMALL, *places(tmp_path), "--epochs", 1).returncode == 0
    (path,) = (tmp_path / "checkpoints").glob("*.pt")
    state = torch.load(path, weights_only=True)
    assert state["record"]["elapsed_s"] > 0
    state["record"]["elapsed_s"] = 1e6
    torch.save(state, path)
    assert script("single", *SMALL, *places(tmp_path), "--epochs", 3).returncode == 0
    rows = rows_of(tmp_path)
    assert [row["warmup"] for row in rows] == [True, True, False]
    assert rows[0]["elapsed_s"] < 1e6 <= rows[1]["elapsed_s"] <= rows[2]["elapsed_s"]


# --- what the job scripts tell Slurm ----------------------------------------------------------------


@pytest.mark.parametrize("launcher", SCRIPTS)
def test_what_a_job_script_tells_sbatch_and_srun(launcher: str, checkout: Checkout) -> None:
    """Read, and run twice by bash on the first node of two, with an srun that starts nothing."""
    script = checkout.folder / SCRIPTS[launcher]
    asked = re.findall(r"^#SBATCH (\S+)", script.read_text(), re.MULTILINE)
    assert {"--signal=USR2@60", "--requeue", "--open-mode=append"} <= set(asked)
    # Slurm says who sees which GPU.
    assert "VISIBLE_DEVICES" not in script.read_text() + (checkout.folder / "slurm/job_env.sh").read_text()

    checkout.fake(
        "scontrol", "printf '127.0.0.2\\n127.0.0.3\\n'"
    )  # show hostnames; as addresses they resolve
    checkout.fake("srun", 'printf \'%s\\n\' "$MASTER_ADDR" "$MASTER_PORT" "$@" >told')
    reads = checkout.folder / "reads"
    checkout.site(f"echo >>'{reads}'\n")
    told = []
    for job, ports in {"41": "10000-29999", "42": "20000-20009"}.items():
        done = checkout.run(
            "bash", script, cwd=script.parent, PATH=f"{checkout.commands}:{os.environ['PATH']}",
            SLURM_SUBMIT_DIR=str(script.parent), SLURM_JOB_ID=job, SLURM_JOB_NODELIST="n[1-2]",
            SLURM_JOB_NUM_NODES="2", SLURM_CPUS_PER_TASK="3", SLURM_GPUS_ON_NODE="2", SITE_PORTS=ports,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        told.append((script.parent / "told").read_text().splitlines())
    assert reads.read_text() == "\n\n"  # once for each job: modules that it loads take seconds
    (address, port, *arguments), (_, other_port, *_) = told
    assert address == "127.0.0.2"
    assert (port, other_port) == ("10041", "20002")
    to_srun = arguments[: arguments.index("python")]
    # Without the first, every rank has one core, whatever sbatch was told.
    assert {"--cpus-per-task=3", "--kill-on-bad-exit=1"} <= set(to_srun)
    assert ("--wait=60" in to_srun) == (launcher in ("srun", "torchrun"))  # one task has nobody to wait for
    after_python = " ".join(arguments[len(to_srun) :])
    if launcher == "torchrun":
        assert f"--rdzv-endpoint={address}:{port}" in after_python
        assert "--nnodes=2 --nproc-per-node=2" in after_python


@pytest.mark.parametrize(
    ("launcher", "fate", "wait"),
    [
        ("srun", "os._exit(3)", 0),
        ("srun", "os._exit(0)", 1),
        ("torchrun", "os.kill(os.getppid(), signal.SIGKILL)", 0),
    ],
    ids=["dies", "leaves early", "torchrun dies"],
)
def test_ranks_that_do_not_talk_are_ended_with_the_one_that_goes(
    launcher: str, fate: str, wait: int, tmp_path: Path, cluster: RunningCluster
) -> None:
    """The rank of the first node sleeps: nothing but srun ends it.

    srun is told to wait for ever in place of 60 s, so that only --kill-on-bad-exit can end it, or for one
    second, and then only --wait can.
    """
    checkout = Checkout(tmp_path / "a checkout", cluster)
    checkout.site(f'srun() {{ command srun "${{@/#--wait=60/--wait={wait}}}"; }}\n')
    second_node = "os.environ['SLURM_NODEID'] == '1'"
    ends = "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])"  # by srun, at once
    script = checkout.folder / "03_multigpu_ddp" / "sleeping.py"
    script.write_text(f"import os, signal, time\n{ends}\nif {second_node}: {fate}\ntime.sleep(150)\n")
    nodes = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1")
    log = checkout.fail(launcher, "sleeping.py", sbatch=nodes)
    assert "First task exited 60s ago" not in log
