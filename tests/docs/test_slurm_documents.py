"""Every command of the documents that needs a Slurm, run as it is written on the practice cluster."""

import re
from pathlib import Path

import lessons
import pytest
from checkout import Checkout
from cluster import RunningCluster
from conftest import REPOSITORY, STAGES

pytestmark = pytest.mark.usefixtures("mnist_dir")

# Commands that other tests run, or that set up what is set up here.
RUN_ELSEWHERE = {"make data", "source .venv/bin/activate"}
PRACTICE_CLUSTER = ("make cluster-", "slurm/practice_cluster/cluster.py ")  # test_practice_cluster.py


def _blocks() -> list[tuple[Path, str]]:
    """Document and commands; all that watch a running job are taken together, from the top folder."""
    blocks, watching = [], []
    for readme, block in lessons.commands(on_a_cluster=True):
        document = readme.relative_to(REPOSITORY)
        lines = [
            line
            for line in block.splitlines()
            if line not in RUN_ELSEWHERE and not any(command in line for command in PRACTICE_CLUSTER)
        ]
        if "<job>" in block:
            assert str(document) in lessons.FROM_THE_TOP
            watching += [line for line in lines if "scancel" not in line]
        elif lines:
            blocks.append((document, "\n".join(lines)))
    return [*blocks, (Path("slurm/MONITORING.md"), "\n".join([*watching, "scancel <job>"]))]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, cluster: RunningCluster) -> Checkout:
    made = Checkout(tmp_path_factory.mktemp("documents") / "checkout", cluster)
    made.site("# nothing special about this cluster\n")
    return made


@pytest.mark.parametrize(("document", "block"), _blocks(), ids=str)
def test_the_commands_of_a_document(document: Path, block: str, checkout: Checkout) -> None:
    """As the document says where; `<job>` is a running job and `<number>` an earlier one.

    Only `<job>` trains, on less data: that the others would, test_job_scripts.py shows.
    """
    checkout.pretend()
    if "monitor.py" in block:
        checkout.site("SITE_MONITOR=on\n")
    if "<job>" in block:
        checkout.script("ddp").write_text(STAGES["ddp"].read_text())
        job = checkout.submit("srun", "--epochs", 1000, "--train-size", 600, "--test-size", 200, "--width", 4)
        checkout.wait_for("epoch 1/", job)
        block = block.replace("<job>", str(job)).replace("<node>", checkout.cluster.job(job)["NodeList"])
    block = block.replace("<number>", "1")  # any number: what has no checkpoint yet begins
    block = re.sub(
        r"^(.*submit.*)$",
        r"\1 --epochs 1 --train-size 600 --test-size 200 --width 4 --precision fp32",
        block,
        flags=re.MULTILINE,
    )
    folder = checkout.folder / lessons.starts_in(REPOSITORY / document)
    done = checkout.run("bash", "-euc", block, cwd=folder)
    checkout.cluster.run(["scancel", "--me"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_submitit_by_itself(checkout: Checkout) -> None:
    """As in the Python of slurm/README.md."""
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "slurm" / "README.md").read_text(), re.DOTALL)
    done = checkout.run("python", "-c", code)
    assert done.stdout.count("rank 1 of 2 trains with") == 2, done.stdout + done.stderr


def test_every_command_left_to_other_tests_is_in_a_document() -> None:
    written = {line for _, block in lessons.commands(on_a_cluster=True) for line in block.splitlines()}
    assert written >= RUN_ELSEWHERE
