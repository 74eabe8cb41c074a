"""The lines by which a job script asks sbatch and srun: what they say, and that ranks end together."""

import os
import re
from pathlib import Path

import lessons
import pytest
from checkout import SCRIPTS, Checkout
from cluster import RunningCluster

from manygpus.jobs.submit import slurm_options


@pytest.mark.parametrize("launcher", SCRIPTS)
def test_what_a_job_script_tells_sbatch_and_srun(launcher: str, checkout: Checkout) -> None:
    """Read, and run twice by bash on the first node of two, with an srun that starts nothing.

    The shell that has sent the job knows another place to meet, of a training of its own.
    """
    script = checkout.folder / SCRIPTS[launcher]
    asked = re.findall(r"^#SBATCH (\S+)", script.read_text(), re.MULTILINE)
    facts = {
        f"--{name}" if fact is True else f"--{name}={fact}" for name, fact in slurm_options.SBATCH.items()
    }
    assert facts <= set(asked)
    # Slurm says who sees which GPU.
    assert "VISIBLE_DEVICES" not in script.read_text() + checkout.job_env.read_text()

    checkout.fake(
        "scontrol", "printf '127.0.0.2\\n127.0.0.3\\n'"
    )  # show hostnames; as addresses they resolve
    checkout.fake("srun", 'printf \'%s\\n\' "$MASTER_ADDR" "$MASTER_PORT" "$@" >start')
    reads = checkout.folder / "reads"
    checkout.site(f"echo >>'{reads}'\n")
    starts = []
    for job, ports in {"41": "10000-29999", "42": "20000-20009"}.items():
        done = checkout.run(
            "bash", script, cwd=script.parent, PATH=f"{checkout.commands}:{os.environ['PATH']}",
            SLURM_SUBMIT_DIR=str(script.parent), SLURM_JOB_ID=job, SLURM_JOB_NODELIST="n[1-2]",
            SLURM_JOB_NUM_NODES="2", SLURM_CPUS_PER_TASK="3", SLURM_GPUS_ON_NODE="2", SITE_PORTS=ports,
            MASTER_ADDR="127.0.0.3", MASTER_PORT="29500",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        starts.append((script.parent / "start").read_text().splitlines())
    assert reads.read_text() == "\n\n"  # once for each job: modules that it loads take seconds
    (address, port, *arguments), (_, other_port, *_) = starts
    assert address == "127.0.0.2"
    assert (port, other_port) == ("10041", "20002")
    to_srun = arguments[: arguments.index("python")]
    # Without it, every rank has one core, whatever sbatch was told.
    assert "--cpus-per-task=3" in to_srun
    after_python = " ".join(arguments[len(to_srun) :])
    if launcher == "torchrun":
        assert f"--rdzv-endpoint={address}:{port}" in after_python
        assert "--nnodes=2 " in after_python


@pytest.mark.parametrize(
    "script",
    [path for path in lessons.files("*.sh") if "\nsrun " in path.read_text() and path.parts[-2] != "scripts"],
    ids=lambda path: "/".join(path.parts[-2:]),
)
def test_a_job_script_to_read_has_the_launch_line_of_those_that_are_made(script: Path) -> None:
    launch = script.read_text().partition("\nsrun ")[2].partition("\n\n")[0]
    options = re.findall(r"(?<=\s)--(?:cpus-per-task|kill|wait)\S*", f" {launch}")
    # Stages 01 and 02 are one process.
    tasks = 1 if {"01_singlegpu", "02_multigpu_dp"} & {*script.parts} else 2
    assert options == [slurm_options.CPUS, *slurm_options.srun_options(tasks)]


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
    # Not before the other one is there: srun has nothing to end in a task that is still being started, and
    # with --wait=0 never looks again.
    waits = "while not os.path.exists('other'): time.sleep(0.05)"
    script.write_text(
        f"import os, signal, time\n{ends}\n"
        f"if {second_node}:\n    {waits}\n    {fate}\n"
        "open('other', 'w').close()\ntime.sleep(150)\n"
    )
    nodes = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1")
    log = checkout.fail(launcher, "sleeping.py", sbatch=nodes)
    assert "First task exited 60s ago" not in log
