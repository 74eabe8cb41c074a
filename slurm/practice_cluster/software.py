"""Slurm, munge and MariaDB: the system's own if they are installed, else packages unpacked into a folder.

The unpacked programs use the C library and the other libraries that were unpacked with them, so that the
packages of another release of Debian run on this machine as well.
"""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from state import ClusterError

HERE = Path(__file__).resolve().parent
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FOLDERS = ["usr/sbin", "usr/bin"]
ACCOUNTING_DAEMONS = ["slurmdbd", "mariadbd"]
DAEMONS = ["munged", "slurmctld", "slurmd", "slurmstepd", *ACCOUNTING_DAEMONS]
COMMANDS = [
    *("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo"),
    *("sprio", "squeue", "sreport", "srun", "sstat", "ip", "tc"),
]
OPTIONAL = [*ACCOUNTING_DAEMONS, "tc"]
CLUSTER_PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge", "iproute2"]
# Of the packages that these need only those that they use: parts of themselves, and libraries.
USED_PACKAGES = r"(lib|slurm|mariadb-server|munge|iproute2|patchelf)"
OWN = "own"
# The release of Debian whose packages hold the named release of Slurm. Testing is the next one: a package
# is some days older than in unstable, but all that it needs is there, too.
DEBIAN = {"22.05": "bookworm", "24.11": "trixie", "newest": "testing"}
NAMES = [OWN, *DEBIAN]
DEBIAN_URL = "http://deb.debian.org/debian"  # apt checks the signatures of what comes from there
DEBIAN_KEYS = Path("usr/share/keyrings/debian-archive-keyring.gpg")


class Slurm:
    """A release of Slurm by its name: one of `NAMES`.

    `own` is what the machine has installed, or else what its distribution has packaged.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.unpacked = HERE / "packages" / name

    def ensure(self, accounting: bool) -> None:
        """Unpack what the system lacks, unless that was done before.

        Raise a ClusterError if it is not available; what only the accounting needs may be missing.
        """
        try:
            (HERE / "packages").mkdir(exist_ok=True)
            file = os.open(HERE / "packages.lock", os.O_RDWR | os.O_CREAT, 0o644)  # waits for no pipe
        except OSError as error:
            raise ClusterError(f"cannot write to {HERE} ({error.strerror}): make it writable.") from error
        with os.fdopen(file, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            incomplete = self.missing() or (accounting and not self.has_accounting())
            if incomplete and not self.unpacked.exists():
                try:
                    self._unpack()
                except ClusterError:
                    if self.missing():
                        raise
            if self.missing():
                raise ClusterError(
                    f"{self.unpacked} lacks {', '.join(self.missing())}: delete that folder, and try again."
                )
            if self.unpacked.exists():
                self._link_to_own_libraries()

    def find(self, program: str) -> Path | None:
        """Return the program's file: for `own` the system's if it is installed, else the unpacked one."""
        if self.name == OWN:
            installed = shutil.which(program, path=SYSTEM_PATH)
            if installed:
                return Path(installed)
        for folder in FOLDERS:
            # Debian's package holds slurmd as slurmd-wlm; installing it would make the plain name.
            for name in (program, f"{program}-wlm"):
                file = self.unpacked / folder / name
                # A link may lead out of the folder, to a program of the machine.
                if file.is_file() and not file.is_symlink():
                    return file
        return None

    def missing(self) -> list[str]:
        """List the programs that a cluster needs and that are missing."""
        needed = [name for name in DAEMONS + COMMANDS if name not in OPTIONAL]
        return [name for name in needed if not self.find(name)]

    def has_accounting(self) -> bool:
        return all(self.find(name) for name in ACCOUNTING_DAEMONS)

    def search_path(self) -> str:
        """Return the PATH of a program started before the cluster has its own commands."""
        return ":".join([*(str(self.unpacked / folder) for folder in FOLDERS), SYSTEM_PATH])

    def version(self) -> str:
        """Return Slurm's version, such as 24.11.5: year and month of its release, and its update."""
        slurmctld = self.find("slurmctld")
        done = subprocess.run([slurmctld, "-V"], capture_output=True, text=True)
        version = re.search(r"\d+\.\d+\.\d+", done.stdout)
        if not version:
            raise ClusterError(
                f"{slurmctld} does not start ({done.stderr.strip() or done.returncode}): remove "
                f"{self.unpacked}, and try again."
            )
        return version[0]

    def _unpack(self) -> None:
        """Fill the folder with the release's packages, or leave no folder at all."""
        if not shutil.which("apt-get") or not shutil.which("dpkg"):
            wanting = "Slurm" if self.name != OWN else ", ".join(self.missing())
            raise ClusterError(
                f"this machine has no {wanting}, and no apt-get to fetch them with: "
                "install Slurm and munge, or use Debian or Ubuntu."
            )
        print("Downloading Slurm (once) ...", flush=True)
        for leftover in HERE.glob("unpacking-*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix="unpacking-", dir=HERE) as temporary:
            here = Path(temporary)
            root = here / "root"
            for package in self._download(here):
                _run(["dpkg", "-x", str(package), str(root)])
            # Older packages have files in /bin and /lib. On a system those are links to the ones in /usr.
            for folder in ("bin", "sbin", "lib"):
                if (root / folder).exists():
                    shutil.copytree(root / folder, root / "usr" / folder, symlinks=True, dirs_exist_ok=True)
                    shutil.rmtree(root / folder)
            for unused in ("doc", "man", "locale"):
                shutil.rmtree(root / "usr" / "share" / unused, ignore_errors=True)
            root.rename(self.unpacked)

    def _download(self, here: Path) -> list[Path]:
        """Download the release's packages, with the libraries that they need, into `here`."""
        # Lists and caches of our own, so that neither root nor up-to-date lists of the system are needed.
        (here / "lists" / "partial").mkdir(parents=True)
        (here / "cache" / "archives" / "partial").mkdir(parents=True)
        # As if nothing were installed: the C library comes along.
        (here / "status").touch()
        options = [
            f"Dir::State::Lists={here / 'lists'}",
            f"Dir::Cache={here / 'cache'}",
            f"Dir::State::status={here / 'status'}",
            "Acquire::Languages=none",
            "Debug::NoLocking=1",
            "APT::Sandbox::User=root",
        ]
        if self.name != OWN:
            options += self._debian_sources(here, options)
        flags = _as_flags(options)
        _run(["apt-get", *flags, "update"])
        databases = _run(["apt-cache", *flags, "pkgnames", "mariadb-server-core"]).split()
        wanted = [*CLUSTER_PACKAGES, "patchelf"]
        if databases:
            wanted += ["slurmdbd", max(databases)]
        plan = _run(["apt-get", *flags, "--simulate", "--no-install-recommends", "install", *wanted])
        needed = re.findall(r"^Inst (\S+) \(", plan, re.MULTILINE)
        used = [name for name in needed if re.match(USED_PACKAGES, name)]
        _run(["apt-get", *flags, "download", *used], cwd=here)
        return sorted(here.glob("*.deb"))

    def _debian_sources(self, here: Path, options: list[str]) -> list[str]:
        """Return apt's options for packages of the Debian that holds this release, and of nothing else."""
        keys = Path("/") / DEBIAN_KEYS
        if not keys.exists():  # on Ubuntu, which has them in a package
            _run(["apt-get", *_as_flags(options), "update"])
            _run(["apt-get", *_as_flags(options), "download", "debian-archive-keyring"], cwd=here)
            (package,) = here.glob("debian-archive-keyring_*.deb")
            _run(["dpkg", "-x", str(package), str(here / "keyring")])
            package.unlink()
            keys = here / "keyring" / DEBIAN_KEYS
        source = f"Types: deb\nURIs: {DEBIAN_URL}\nSuites: {DEBIAN[self.name]}\nComponents: main\n"
        (here / "debian.sources").write_text(f"{source}Signed-By: {keys}\n")
        unused = ("SourceParts", "Preferences", "PreferencesParts")
        return [
            f"Dir::Etc::SourceList={here / 'debian.sources'}",
            *(f"Dir::Etc::{setting}=/dev/null" for setting in unused),
        ]

    def _link_to_own_libraries(self) -> None:
        """Write into each unpacked program where its loader and its libraries are, unless that is there.

        The loader's path is an absolute one, so this is done again when the checkout has been moved. Without
        it: LD_LIBRARY_PATH would reach the jobs, and a loader on the command line is lost where slurmctld
        starts itself again.
        """
        (loader,) = self.unpacked.glob("usr/lib/*/ld-linux*.so.*")
        libraries = loader.parent
        patchelf = [loader, "--library-path", libraries, self.unpacked / "usr" / "bin" / "patchelf"]
        for program in [self.find(name) for name in DAEMONS + COMMANDS]:
            if not program or not program.is_relative_to(self.unpacked):
                continue
            if b"\0" + os.fsencode(loader) + b"\0" in program.read_bytes():
                continue  # it was done before
            changed = program.with_name(f"{program.name}.new")
            search = f"$ORIGIN/../lib/{libraries.name}"
            command = [
                *patchelf,
                *("--set-interpreter", loader),
                *("--force-rpath", "--set-rpath", f"{search}:{search}/slurm-wlm"),
                *("--output", changed),
                program,
            ]
            _run([str(word) for word in command])
            changed.replace(program)


def _as_flags(options: list[str]) -> list[str]:
    flags = []
    for option in options:
        flags += ["-o", option]
    return flags


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
        output = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        last_line = output.splitlines()[-1]
        raise ClusterError(
            f"could not get Slurm: {Path(command[0]).name} says {last_line!r}. Check the network and apt's "
            "sources, or install Slurm and munge."
        )
    return done.stdout
