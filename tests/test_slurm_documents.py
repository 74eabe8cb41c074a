"""Every command in the documents about Slurm, run as it is written on the practice cluster."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import Checkout
from cluster import RunningCluster, running_cluster
from conftest import REPOSITORY

BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Commands that other tests run, or that set up what is set up here.
RUN_ELSEWHERE = {"make data"}


def blocks(document: str) -> list[str]:
    text = (REPOSITORY / "slurm" / document).read_text()
    return [
        "".join(line for line in block.splitlines(True) if line.strip() not in RUN_ELSEWHERE)
        for block in BLOCK.findall(text)
    ]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster(nodes=2, gpus=2, accounting=True) as running:
        yield running


@pytest.fixture
def checkout(tmp_path: Path, cluster: RunningCluster) -> Checkout:
    made = Checkout(tmp_path / "checkout", cluster)
    (made.folder / "slurm" / "site.sh").write_text("# nothing special about this cluster\n")
    return made


@pytest.mark.parametrize("block", blocks("README.md"))
def test_the_first_jobs(block: str, checkout: Checkout) -> None:
    """From the top folder of a checkout, on less data."""
    earlier = checkout.submit("single", "--dry-run")  # for the block that goes on with a job
    checkout.cluster.wait(earlier)
    shorter = re.sub(r"^(.*submit.*)$", r"\1 --epochs 1 --train-size 600", block, flags=re.MULTILINE)
    block = shorter.replace("<number>", str(earlier))
    done = checkout.cluster.run(["bash", "-euc", block], cwd=checkout.folder, env=checkout.env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", blocks("MONITORING.md"))
def test_watching_a_job(block: str, checkout: Checkout) -> None:
    """While a job of stage 03 runs."""
    job = checkout.submit("srun", "--epochs", 1000, "--train-size", 600)
    checkout.wait_for("epoch 1/", job)
    block = block.replace("<job>", str(job)).replace("<node>", checkout.cluster.job(job)["NodeList"])
    done = checkout.cluster.run(
        ["bash", "-euc", block], cwd=checkout.folder / "03_multigpu_ddp", env=checkout.env
    )
    checkout.cluster.run(["scancel", job])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
