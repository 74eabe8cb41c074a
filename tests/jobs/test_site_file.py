"""slurm/site.sh, whatever is in it: one sentence on the login node and in a job, or it works."""

import os
from pathlib import Path

import pytest
from checkout import Checkout
from cluster import RunningCluster
from conftest import ran, succeeded

from trainkit.doctor import login_node
from trainkit.doctor.checkup import FAULT
from trainkit.jobs import site
from trainkit.runtime.errors import UserError

FAILS = "slurm/site.sh fails, correct it: "
ENDS = f"{FAILS}it ends the shell that reads it (exit, exec, or a command that fails), with exit code "
WINDOWS = "slurm/site.sh has the line ends or the byte order mark of Windows"
BAD = {
    b"export SBATCH_PARTITION=practice\r\n": WINDOWS,
    b"if true; do\n": "slurm/site.sh is not valid shell code, correct it: ",
    b"\x7fELF\x00\r\n\x01": "slurm/site.sh is no text",
    b"\xef\xbb\xbfexport SBATCH_PARTITION=practice\n": WINDOWS,
    b'source "$REPOSITORY"/slurm/site_env.sh\n': f"{FAILS}it sources site_env.sh, which reads it",
    b"REPOSITORY=/tmp\n": f"{FAILS}{{}}/slurm/site.sh: line 1: REPOSITORY: readonly variable",
    b"readonly DATA_DIR=/here\n": f"{FAILS}it makes DATA_DIR read-only",
    b"echo $NOT_SET_ANYWHERE\n": f"{FAILS}{{}}/slurm/site.sh: line 1: NOT_SET_ANYWHERE: unbound variable",
    b"module load cuda\n": f"{FAILS}{{}}/slurm/site.sh: line 1: module: command not found",
    b"false\n": f"{ENDS}1",
    b"exit 0\n": f"{ENDS}0",
    b"trap 'echo bye' EXIT\n": f"{FAILS}it sets a trap",
    b"trap 'exit 0' EXIT\n": f"{FAILS}it sets a trap",
    b"trap '' USR2\n": f"{FAILS}it sets a trap",
    b"sleep 600 &\n": f"{FAILS}it leaves a process behind",
    b"readonly SITE_CONTAINER\n": f"{FAILS}it makes SITE_CONTAINER read-only",
    b"SITE_DATA_DIR='~/data'\n": "slurm/site.sh names the folder ~/data, which depends on where you are",
    b"PATH=/nowhere\n": "slurm/site.sh leaves PATH without the usual commands",
    b"export BIG=$(printf %0150000d 1)\n": "no command starts after slurm/site.sh",
    b"cat <<X >/dev/null\nexport SBATCH_QOS=short\n": "slurm/site.sh is not valid shell code, correct it: ",
    b"kill -KILL $$\n": f"{ENDS}137",
    b"unset -f activate_environment\n": f"{FAILS}it takes away activate_environment",
    b"fail() { echo $1; }\n": f"{FAILS}it has its own function fail",
    b"readonly code=0\n": f"{FAILS}it makes code read-only",
    b"readonly LOCAL_RANK=0\n": f"{FAILS}it makes LOCAL_RANK read-only",
    b"shopt -s nocasematch\nreadonly IFS\n": f"{FAILS}it makes IFS read-only",
    b"set -t\n": f"{FAILS}it sets an option that ends or restricts a shell",
    b"readonly IFS\n": f"{FAILS}it makes IFS read-only",
    b"printf 'a\\0b' >&2\n": f"{FAILS}it prints a zero byte",
    b"trap '' TERM; while :; do :; done\n": f"{FAILS}it does not end",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """The site file of this checkout is read by the checks within this process."""
    place = Checkout(tmp_path / "a checkout")
    for module in (site, login_node):
        monkeypatch.setattr(module, "REPOSITORY", place.folder)
    reader = place.folder / "slurm" / "site_env.sh"
    assert " most=60\n" in reader.read_text()
    reader.write_text(reader.read_text().replace(" most=60\n", " most=2\n"))
    return place


def told(level: str) -> str:
    """What the doctor finds in the site file, and the fixes."""
    return "\n".join(f"{f.message} -> {f.fix}" for f in login_node.check_site()[1] if f.level == level)


def test_a_site_file_that_would_end_a_job(checkout: Checkout) -> None:
    file = checkout.folder / "slurm" / "site.sh"
    for text, sentence in BAD.items():
        file.write_bytes(text)
        assert told(FAULT).startswith(sentence.format(checkout.folder)), text
    unreadable = "slurm/site.sh cannot be read"
    file.unlink()
    file.mkdir()
    assert unreadable in told(FAULT)
    file.rmdir()
    os.mkfifo(file)
    assert unreadable in told(FAULT)
    file.unlink()
    file.symlink_to("/nowhere")
    done = checkout.submit_py("single", "--dry-run")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {unreadable}")
    assert done.stderr.count("\n") == 1


def test_variables_from_another_file(checkout: Checkout) -> None:
    """`set +a` of the site file is not for what comes after it."""
    (checkout.folder / "more.env").write_text("SBATCH_ACCOUNT=me\n")
    checkout.site(f"set -a\nsource '{checkout.folder}/more.env'\nset +a\nSBATCH_QOS=short\n")
    assert {"SBATCH_ACCOUNT": "me", "SBATCH_QOS": "short"}.items() <= site.read_site().sbatch.items()


def test_what_it_leaves_behind_in_the_shell(checkout: Checkout) -> None:
    changed = "set -o posix -kf +B\nshopt -s nocasematch\nIFS=0123456789\ncd /\nexec >/dev/null 2>&1 <&-\n\n"
    checkout.site(f"{changed}set -- other\nSBATCH_QOS=short\nexport SBATCH_QOS\n")
    assert site.read_site().sbatch["SBATCH_QOS"] == "short"
    environment = f"cd '{checkout.folder}'; set -u -- --epochs '2 3'; source slurm/site_env.sh; "
    assert succeeded(ran("bash", "-c", environment + 'printf "%s" "$@" {,}')).stdout == "--epochs2 3"


def test_what_fails_when_it_is_read_again(checkout: Checkout) -> None:
    checkout.site(f"mkdir '{checkout.folder}/made'\n")
    with pytest.raises(UserError, match="fails where it is read again: it must do the same each time"):
        site.read_site()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("exit 0\n", f"{ENDS}0"),
        (
            "activate_environment() { exit 0; }\n",
            "activate_environment of slurm/site.sh ends the shell, and the job: leave out exit and set -u.",
        ),
    ],
)
def test_a_job_tells_it_too(text: str, error: str, tmp_path: Path, cluster: RunningCluster) -> None:
    """Plain sbatch reads no site file, but the job does: without this it would be COMPLETED at once."""
    checkout = Checkout(tmp_path / "a checkout", cluster)
    checkout.site(text)
    assert checkout.fail("single") == f"error: {error}\n"
