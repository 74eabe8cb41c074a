"""slurm/site.sh that cannot be used: one sentence on the login node and in a job."""

import os
import pwd
import re
from pathlib import Path

import pytest
from checkout import Checkout
from conftest import succeeded

from manygpus.jobs import site
from manygpus.jobs.doctor import login_node
from manygpus.jobs.doctor.findings import FAULT, WARNING

ENDS = "ends the shell"
# Bad site files, and what the fault has to name.
BAD = {
    b"export SBATCH_PARTITION=practice\r\n": "Windows",
    b"\xef\xbb\xbfexport SBATCH_PARTITION=practice\n": "Windows",
    b"if true; do\n": "not valid shell code",
    b"cat <<X >/dev/null\nexport SBATCH_QOS=short\n": "not valid shell code",
    b"exit 0\n": ENDS,
    b"module load cuda\n": ENDS,
    b"SITE_GPUS=a100\n": "SITE_GPUS",
    b"SITE_DATA_DIR='~/data'\n": "~/data",
    b"SITE_PORTS=20000\n": "SITE_PORTS",
    b"SITE_MOST_RESTARTS=many\n": "SITE_MOST_RESTARTS",
    b"SITE_NODE_CHECK=yes\n": "SITE_NODE_CHECK",
    b"SITE_STALLED_SECONDS=600\nSITE_MONITOR=off\n": "SITE_MONITOR=off",
    # NCCL alone understands these.
    b"SITE_NETWORK_INTERFACE=^lo,docker0\n": "SITE_NETWORK_INTERFACE",
    b"SITE_NETWORK_INTERFACE==eth0\n": "SITE_NETWORK_INTERFACE",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """The site file of this checkout is read by the checks within this process."""
    place = Checkout(tmp_path / "a checkout")
    for module in (site, login_node):
        monkeypatch.setattr(module, "SCRIPTS", place.job_env.parent)
    monkeypatch.setattr(login_node, "REPOSITORY", place.folder)
    return place


def test_a_site_file_that_cannot_be_used(checkout: Checkout) -> None:
    file = checkout.folder / "slurm" / "site.sh"
    for text, named in BAD.items():
        file.write_bytes(text)
        (fault,) = [finding for finding in login_node.check_site()[1] if finding.level == FAULT]
        assert named in fault.message + fault.fix, text
    checkout.site("module load cuda\n")
    done = checkout.submit_py("single", "--dry-run")
    assert done.returncode == 1
    sentence = rf"error: slurm/site.sh {ENDS} that reads it.*\(line 1: module: command not found\)\n"
    assert re.fullmatch(sentence, done.stderr), done.stderr


def test_a_folder_with_the_name_of_the_user(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the example; containers and cron do not set it."""
    monkeypatch.delenv("USER", raising=False)
    checkout.site("SITE_SCRATCH_DIR=/scratch/$USER\n")
    user = pwd.getpwuid(os.getuid()).pw_name
    assert site.read_site().jobs_dir == Path("/scratch") / user


def test_the_words_of_a_site(checkout: Checkout) -> None:
    """They may be empty, or an array, as other words in this file are."""
    checkout.site("SITE_GPUS=(--gres=gpu:a100:%d --constraint=a100)\nSITE_MEM=\n")
    words = {"SITE_GPUS": "--gres=gpu:a100:%d --constraint=a100", "SITE_MEM": ""}
    assert site.read_site().option_templates == site.OPTION_TEMPLATES | words


def test_a_misspelt_name_is_a_warning(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name that it may be; of the shell only what sbatch would read."""
    monkeypatch.setenv("USER", "me")
    monkeypatch.setenv("SITE_OF_SOMETHING_ELSE", "1")
    monkeypatch.setenv("SBATCH_RESERVATON", "workshop")
    checkout.site("export SBATCH_PARTITON=gpu\nSITE_GPU=--gres=gpu:%d\nSITE_SRUN_ARG=(--mpi=none)\n")
    right = ["SBATCH_PARTITION", "SBATCH_RESERVATION", "SITE_GPUS", "SITE_SRUN_ARGS"]
    _, findings = login_node.check_site()
    warned = [finding.message for finding in findings if finding.level == WARNING]
    assert len(warned) == len(right)
    assert all(re.search(rf"\b{name}\b", sentence) for name, sentence in zip(right, warned, strict=True))
    # None of the settings that there are.
    monkeypatch.delenv("SBATCH_RESERVATON")
    example = (checkout.folder / "slurm" / "site.example.sh").read_text()
    settings = re.sub(r"^#(?=SITE_\w+=|export )", "", example, flags=re.MULTILINE)
    # Two of them exclude others.
    checkout.site(f"{settings}\nSITE_MONITOR=on\nSITE_STAGE_ENV=\n")
    assert site.read_site().names and not site.read_site().misspelt


@pytest.mark.usefixtures("mnist_dir")
def test_it_is_read_once_for_a_command(checkout: Checkout) -> None:
    """Modules that it loads take seconds."""
    reads = checkout.folder / "reads"
    checkout.site(f"echo >>'{reads}'\n")
    succeeded(checkout.submit_py("single", "--dry-run"))
    assert reads.read_text() == "\n"
    succeeded(checkout.python("slurm/sweep.py", "--dry-run", "--gpus", 1, "--stages", "single"))
    assert reads.read_text() == "\n\n"


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("exit 0\n", "slurm/site.sh"),
        ("activate_environment() { exit 0; }\n", "activate_environment"),
    ],
)
def test_a_job_tells_it_too(text: str, culprit: str, on_cluster: Checkout) -> None:
    """Plain sbatch reads no site file, but the job does: without this it would be COMPLETED at once."""
    on_cluster.site(text)
    first, *_ = on_cluster.fail("single").splitlines()
    assert first.startswith(f"error: {culprit}") and ENDS in first
