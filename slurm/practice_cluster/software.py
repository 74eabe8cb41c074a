"""Slurm, munge and MariaDB: the system's own if they are installed, else unpacked into a folder here."""

import fcntl
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from state import ClusterError

HERE = Path(__file__).resolve().parent
# A folder with another release of Slurm, unpacked, takes the place of both.
GIVEN = os.environ.get("PRACTICE_SLURM", "")
UNPACKED = Path(GIVEN).resolve() if GIVEN else HERE / "packages"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FOLDERS = ["usr/sbin", "usr/bin", "sbin", "bin"]
ACCOUNTING_DAEMONS = ["slurmdbd", "mariadbd"]
DAEMONS = ["munged", "slurmctld", "slurmd", "slurmstepd", *ACCOUNTING_DAEMONS]
COMMANDS = [
    *("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo"),
    *("sprio", "squeue", "sreport", "srun", "sstat", "ip", "tc"),
]
OPTIONAL = [*ACCOUNTING_DAEMONS, "tc"]
CLUSTER_PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge", "iproute2"]


def ensure(accounting: bool) -> None:
    """Unpack what the system lacks, unless that was done before, or a folder is given.

    Raise a ClusterError if it is not available; what only the accounting needs may be missing.
    """
    if GIVEN:
        if missing():
            raise ClusterError(f"PRACTICE_SLURM is {GIVEN}, which lacks {', '.join(missing())}: correct it.")
        return
    try:
        file = os.open(HERE / "packages.lock", os.O_RDWR | os.O_CREAT, 0o644)  # waits for no pipe
    except OSError as error:
        raise ClusterError(f"cannot write to {HERE} ({error.strerror}): make it writable.") from error
    with os.fdopen(file, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (missing() or accounting and not has_accounting()) and not UNPACKED.exists():
            try:
                _unpack()
            except ClusterError:
                if missing():
                    raise
    if missing():
        raise ClusterError(f"{UNPACKED} lacks {', '.join(missing())}: delete that folder, and try again.")


def find(program: str) -> Path | None:
    """Return the program's file: the system's own, else the unpacked one; of a given folder first."""
    installed = shutil.which(program, path=SYSTEM_PATH)
    # Debian's package holds slurmd as slurmd-wlm; installing it would make the plain name.
    names = (program, f"{program}-wlm")
    places = [UNPACKED / folder / name for folder in FOLDERS for name in names]
    unpacked = next((place for place in places if place.exists()), None)
    system = Path(installed) if installed else None
    return (unpacked or system) if GIVEN else (system or unpacked)


def brings_its_c_library() -> bool:
    """Return whether the unpacked programs name libraries of their own, and need no variable for them."""
    return bool(list(UNPACKED.glob("usr/lib/*/ld-linux*.so.*")))


def missing() -> list[str]:
    """List the programs that a cluster needs and that are missing."""
    needed = [name for name in DAEMONS + COMMANDS if name not in OPTIONAL]
    return [name for name in needed if not find(name)]


def has_accounting() -> bool:
    return all(find(name) for name in ACCOUNTING_DAEMONS)


def libraries() -> list[Path]:
    """List the folders with the unpacked shared libraries."""
    files = itertools.chain(UNPACKED.glob("lib/**/lib*.so*"), UNPACKED.glob("usr/lib/**/lib*.so*"))
    return sorted({file.parent for file in files})


def environment() -> dict[str, str]:
    """Return the environment of a program started before the cluster has its own commands."""
    path = [*(str(UNPACKED / folder) for folder in FOLDERS), SYSTEM_PATH]
    environment = os.environ | {"PATH": ":".join(path)}
    if not brings_its_c_library():
        environment["LD_LIBRARY_PATH"] = ":".join(map(str, libraries()))
    return environment


def loader(program: Path) -> str:
    """Return the dynamic loader named in the program's header, such as /lib64/ld-linux-x86-64.so.2."""
    return re.search(rb"(/lib\w*/ld-[^\0]+)\0", program.read_bytes())[1].decode()


def _unpack() -> None:
    """Fill the folder with the packages that the system lacks, or leave no folder at all."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise ClusterError(
            f"this machine has no {', '.join(missing())}, and no apt-get to fetch them with: "
            "install Slurm and munge, or use Debian or Ubuntu."
        )
    print("Downloading Slurm (once) ...", flush=True)
    for leftover in HERE.glob("unpacking-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=HERE) as temporary:
        here = Path(temporary)
        for package in _download(here):
            _run(["dpkg", "-x", str(package), str(here / "root")])
        (here / "root").rename(UNPACKED)


def _download(here: Path) -> list[Path]:
    """Download the packages that the system lacks, with the dependencies that apt finds."""
    # Lists and caches of our own, so that neither root nor up-to-date lists of the system are needed.
    (here / "lists" / "partial").mkdir(parents=True)
    (here / "cache" / "archives" / "partial").mkdir(parents=True)
    options = [f"Dir::State::Lists={here / 'lists'}", f"Dir::Cache={here / 'cache'}"]
    options += ["Debug::NoLocking=1", "APT::Sandbox::User=root"]
    flags = [word for option in options for word in ("-o", option)]
    _run(["apt-get", *flags, "update"])
    databases = _run(["apt-cache", *flags, "pkgnames", "mariadb-server-core"]).split()
    wanted = CLUSTER_PACKAGES + (["slurmdbd", max(databases)] if databases else [])
    plan = _run(["apt-get", *flags, "--simulate", "--no-install-recommends", "install", *wanted])
    # "Inst NAME (VERSION ..." is a new package, "Inst NAME [OLD] (VERSION ..." a newer one of what is there.
    names = re.findall(r"^Inst (\S+) \(", plan, re.MULTILINE)
    _run(["apt-get", *flags, "download", *names], cwd=here)
    return sorted(here.glob("*.deb"))


def _run(command: list[str], **how: object) -> str:
    """Return the command's output; raise a ClusterError with its reason if it fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"LC_ALL": "C"},
        **how,
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise ClusterError(
            f"could not get Slurm: {command[0]} says {said[-1]!r}. Check the network and apt's sources, "
            "or install Slurm and munge."
        )
    return done.stdout
