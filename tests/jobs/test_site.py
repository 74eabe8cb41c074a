"""slurm/site.sh that cannot be used: one sentence on the login node and in a job."""

import re
from pathlib import Path

import pytest
from checkout import Checkout
from conftest import succeeded

from trainkit.doctor import login_node
from trainkit.doctor.checkup import FAULT
from trainkit.jobs import site

ENDS = "slurm/site.sh ends the shell that reads it"
WINDOWS = "slurm/site.sh has the line ends or the byte order mark of Windows"
NO_SHELL_CODE = "slurm/site.sh is not valid shell code, correct it: "
BAD = {
    b"export SBATCH_PARTITION=practice\r\n": WINDOWS,
    b"\xef\xbb\xbfexport SBATCH_PARTITION=practice\n": WINDOWS,
    b"if true; do\n": NO_SHELL_CODE,
    b"cat <<X >/dev/null\nexport SBATCH_QOS=short\n": NO_SHELL_CODE,
    b"exit 0\n": ENDS,
    b"module load cuda\n": ENDS,
    b"SITE_GPUS=a100\n": "SITE_GPUS of slurm/site.sh has 'a100'",
    b"SITE_DATA_DIR='~/data'\n": "slurm/site.sh names the folder ~/data, relative to where you are",
    b"SITE_PORTS=20000\n": "SITE_PORTS is a range such as 10000-29999, not 20000",
    b"SITE_MOST_RESTARTS=many\n": "SITE_MOST_RESTARTS is a number, not many",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """The site file of this checkout is read by the checks within this process."""
    place = Checkout(tmp_path / "a checkout")
    for module in (site, login_node):
        monkeypatch.setattr(module, "REPOSITORY", place.folder)
    return place


def told(level: str) -> str:
    """What the doctor finds in the site file, and the fixes."""
    return "\n".join(f"{f.message} -> {f.fix}" for f in login_node.check_site()[1] if f.level == level)


def test_a_site_file_that_cannot_be_used(checkout: Checkout) -> None:
    file = checkout.folder / "slurm" / "site.sh"
    for text, sentence in BAD.items():
        file.write_bytes(text)
        assert told(FAULT).startswith(sentence), text
    checkout.site("module load cuda\n")
    done = checkout.submit_py("single", "--dry-run")
    assert done.returncode == 1
    assert re.fullmatch(rf"error: {ENDS}.*\(line 1: module: command not found\)\n", done.stderr), done.stderr


def test_the_words_of_a_site(checkout: Checkout) -> None:
    """They may be empty, or an array, as other words in this file are."""
    checkout.site("SITE_GPUS=(--gres=gpu:a100:%d --constraint=a100)\nSITE_MEM=\n")
    words = {"SITE_GPUS": "--gres=gpu:a100:%d --constraint=a100", "SITE_MEM": ""}
    assert site.read_site().option_templates == site.OPTION_TEMPLATES | words


def test_it_is_read_once_for_a_command(checkout: Checkout) -> None:
    """Modules that it loads take seconds."""
    reads = checkout.folder / "reads"
    checkout.site(f"echo >>'{reads}'\n")
    succeeded(checkout.submit_py("single", "--dry-run"))
    assert reads.read_text() == "\n"
    succeeded(checkout.python("slurm/sweep.py", "--dry-run", "--gpus", 1, "--stages", "single"))
    assert reads.read_text() == "\n\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("exit 0\n", ENDS),
        ("activate_environment() { exit 0; }\n", "activate_environment of slurm/site.sh ends the shell"),
    ],
)
def test_a_job_tells_it_too(text: str, error: str, on_cluster: Checkout) -> None:
    """Plain sbatch reads no site file, but the job does: without this it would be COMPLETED at once."""
    on_cluster.site(text)
    assert on_cluster.fail("single").startswith(f"error: {error}")
