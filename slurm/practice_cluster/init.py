"""The first process of a practice cluster: it starts the daemons, and adopts what they leave behind.

    python init.py NAME

It makes the file `ready` when the nodes wait for jobs. If they never do, its last line on stderr says why.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import config
from adopt import adopt_orphans
from processes import NAMESPACES
from state import Cluster, ClusterError

START_SECONDS = 60.0  # that a daemon may take on a busy machine
HERE = Path(__file__).resolve().parent


def main() -> None:
    cluster = Cluster.load(sys.argv[1])
    (cluster.folder / "init.pid").write_text(str(os.getpid()))
    adopt_orphans()
    try:
        start(cluster)
    except ClusterError as error:
        sys.exit(str(error))
    (cluster.folder / "ready").touch()
    while True:
        os.wait()


def start(cluster: Cluster) -> None:
    """Start the daemons in order, each as soon as the one it needs answers.

    Jobs need no accounting: where that does not start, the cluster goes on without.
    """
    start_munged(cluster)
    if cluster.accounting:
        try:
            start_accounting(cluster)
        except ClusterError as error:
            print(error, file=sys.stderr, flush=True)  # for `up`, which tells it
            cluster.accounting = False
            config.write_slurm_conf(cluster)
            cluster.save()
    slurmctld = Daemon(cluster, "slurmctld", ["slurmctld", "-D"])
    slurmctld.wait_for(lambda: listens(cluster, config.SLURMCTLD_PORT))
    slurmds = {node: start_slurmd(cluster, node) for node in cluster.node_names}
    for node, slurmd in slurmds.items():
        slurmd.wait_for(partial(is_idle, node), needed=slurmctld)


class Daemon:
    """A program of the cluster. Its output goes to log/NAME.log."""

    def __init__(
        self, cluster: Cluster, name: str, command: Sequence[str], stdin: Path = Path(os.devnull)
    ) -> None:
        self.name = name
        self.log = cluster.folder / "log" / f"{name}.log"
        with self.log.open("w") as log, stdin.open() as source:
            self.process = subprocess.Popen(command, stdin=source, stdout=log, stderr=log)

    def wait_for(self, condition: Callable[[], bool], needed: "Daemon | None" = None) -> None:
        """Return when `condition` is true; raise a ClusterError if the daemon ends or takes too long.

        Args:
            needed: a daemon that it talks to, which may end as well: slurmctld listens before it has read all
                of slurm.conf.
        """
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            for daemon in (needed, self):
                if daemon and daemon.process.poll() is not None:
                    raise daemon.failure("ended")
            if time.monotonic() > deadline:
                raise self.failure(f"was not ready after {START_SECONDS:.0f} s")
            time.sleep(0.02)

    def wait_for_end(self) -> None:
        """Wait for a command that has to succeed and end; raise a ClusterError if it fails."""
        if self.process.wait() != 0:
            raise self.failure("failed")

    def failure(self, what: str) -> ClusterError:
        """Return an error with the last two lines of the log that report one, or the last line."""
        lines = self.log.read_text(errors="replace").splitlines() or ["it wrote nothing"]
        errors = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
        reason = "; ".join(errors[-2:] or lines[-1:])
        return ClusterError(f"{self.name} {what}: {reason} (all of it: {self.log})")


def start_munged(cluster: Cluster) -> None:
    """Start Munge, by which a daemon knows which user sent it a message."""
    folder = cluster.folder
    files = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "log-file": "log/munge.log",
        "seed-file": "munge.seed",
    }
    options = [f"--{option}={folder / file}" for option, file in files.items()]
    # --force: it mistrusts files below /tmp, but only we may enter our folder.
    munged = Daemon(cluster, "munged", ["munged", "--foreground", "--force", *options])
    munged.wait_for((folder / "munge.socket").exists)


def start_accounting(cluster: Cluster) -> None:
    """Start the database, empty, then the daemon that keeps the accounts in it.

    Raise a ClusterError, and leave no database, if one of them fails.
    """
    database = cluster.folder / "mariadb.socket"
    command = ["mariadbd", f"--defaults-file={cluster.folder / 'mariadb.cnf'}"]
    tables = cluster.folder / "tables.sql"
    Daemon(cluster, "mariadbd-tables", [*command, "--bootstrap"], stdin=tables).wait_for_end()
    mariadbd = Daemon(cluster, "mariadbd", command)
    try:
        mariadbd.wait_for(database.exists)
        slurmdbd = Daemon(cluster, "slurmdbd", ["slurmdbd", "-D"])
        slurmdbd.wait_for(lambda: listens(cluster, config.SLURMDBD_PORT))
        add_cluster = ["sacctmgr", "--immediate", "add", "cluster", "practice"]
        Daemon(cluster, "sacctmgr", add_cluster).wait_for_end()
    except ClusterError:
        mariadbd.process.kill()
        raise


def start_slurmd(cluster: Cluster, node: str) -> Daemon:
    command = ["slurmd", "-D", "-N", node, "-d", str(cluster.folder / "bin" / "slurmstepd")]
    if cluster.hosts:
        prepare = [HERE / "node.sh", node, cluster.node_address(node), os.getpid(), cluster.mbit]
        command = ["unshare", *NAMESPACES, *map(str, prepare), *command]
    return Daemon(cluster, f"slurmd-{node}", command)


def listens(cluster: Cluster, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((cluster.login_address, cluster.first_port + port)) == 0


def is_idle(node: str) -> bool:
    command = ["sinfo", "--noheader", "--partition=practice", f"--nodes={node}", "--format=%T"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() == "idle"


if __name__ == "__main__":
    main()
