"""A real Slurm on this machine to practise on: up, status, shell, network, down. See README.md."""

import argparse
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import config
import processes
import software
from state import Cluster, ClusterError, check_folder, folder, slurm_conf

HERE = Path(__file__).resolve().parent
# Between the well-known ports and those that job scripts choose, which are five digits long.
PORTS = range(7000, 10000)


# What the job scripts ask for, for each GPU: training on virtual ones takes 1 GB.
GPU_MEMORY_MB = 8192


class StartError(ClusterError):
    """A daemon did not start; its text names the log that says more."""


def main() -> int:
    arguments = parse()
    return arguments.action(arguments)


def parse() -> argparse.Namespace:
    words = sys.argv[1:]
    command_of_shell = []
    if "--" in words:
        at = words.index("--")
        command_of_shell = words[at + 1 :]
        words = words[:at]
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--name", type=cluster_name, default="practice", help="of the cluster (default: practice)"
    )
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def add(action: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = actions.add_parser(action.__name__, parents=[common], help=action.__doc__)
        added.set_defaults(action=action)
        return added

    options = add(up)
    options.add_argument(
        "--slurm",
        choices=software.NAMES,
        default=software.OWN,
        help="the release: this machine's own (default), that of Debian 12 or 13, or the newest one there is",
    )
    options.add_argument("--nodes", type=number(1, 16), default=2)
    options.add_argument("--gpus", type=number(0, 16), default=2, help="virtual GPUs per node (default: 2)")
    options.add_argument(
        "--gpu-kind",
        type=gpu_kind,
        metavar="KIND",
        help="of the GPUs, such as a100 (default: none)",
    )
    options.add_argument("--cpus", type=number(1, 256), default=4, help="CPUs per node (default: 4)")
    options.add_argument(
        "--mode",
        choices=["hosts", "one-host"],
        help="every node a separate host (default, if that is allowed), or all nodes on this host",
    )
    options.add_argument(
        "--bandwidth",
        type=bandwidth,
        default=0,
        metavar="RATE",
        help="at which a node sends, such as 100mbit (default: as fast as the machine can)",
    )
    options.add_argument(
        "--no-accounting", action="store_true", help="no database: a quicker start, but no sacct"
    )
    options.add_argument(
        "--conf",
        type=existing_folder,
        metavar="FOLDER",
        help="more of the cluster's configuration: a slurm.conf whose lines come last, and count, and files "
        "such as job_submit.lua or cgroup.conf",
    )
    add(status)
    add(shell)
    options = add(network)
    options.add_argument("node")
    options.add_argument("state", choices=["up", "down"])
    add(down)
    arguments = parser.parse_args(words)
    arguments.words = command_of_shell
    if arguments.words and arguments.action is not shell:
        parser.error("only shell takes a command")
    if arguments.action is up and arguments.bandwidth and arguments.mode == "one-host":
        parser.error("--bandwidth needs nodes that are hosts of their own: leave out --mode one-host")
    return arguments


def cluster_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to 31 small letters, digits and dashes")
    return text


def gpu_kind(text: str) -> str:
    """Return a kind as real clusters have it, such as nvidia_h100_80gb_hbm3 or 1g.10gb, a part of a GPU."""
    if not re.fullmatch("[A-Za-z0-9_.-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not letters, digits, dots, dashes and underscores")
    return text


def existing_folder(text: str) -> str:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return str(Path(text).resolve())


def number(least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not re.fullmatch("[0-9]+", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return convert


def bandwidth(text: str) -> int:
    """In Mbit/s."""
    rate = re.fullmatch(r"([1-9][0-9]{0,2}|1000)mbit", text)
    if not rate:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate from 1mbit to 1000mbit")
    return int(rate[1])


def up(arguments: argparse.Namespace) -> int:
    """start a cluster"""
    name = arguments.name
    with lock(name):
        if processes.first(name):
            raise ClusterError(f"{name} is up already: take it down first, or choose a different --name.")
        clear(name)  # what a crash may have left
        try:
            asked = prepare(arguments)
            start(asked)
        except StartError:
            processes.kill(name)  # the logs stay, as the error names them
            raise
        except OSError as error:
            remove(name)
            raise ClusterError(f"{name} cannot be started: {error}.") from error
        except BaseException:
            remove(name)
            raise
    cluster = load(name)
    tell(*description(cluster))
    if asked.accounting and not cluster.accounting:
        tell(f"There is no sacct, as the accounting did not start: {last_words(cluster)}")
    elif not cluster.accounting and not arguments.no_accounting:
        tell("MariaDB and slurmdbd could not be had, so there is no sacct.")
    return 0


def status(arguments: argparse.Namespace) -> int:
    """show nodes, partitions and jobs"""
    cluster = load(arguments.name)
    tell(*description(cluster), "")
    columns = "NodeList:10,StateLong:12,CPUs:6,Memory:10,Gres:10,GresUsed"
    nodes = f"sinfo --partition=practice --Node --Format={columns}"
    command = on_login_host(cluster, ["sh", "-c", f"{nodes} && echo && sinfo && echo && squeue"])
    return subprocess.run(command, env=user_environment(cluster)).returncode


def shell(arguments: argparse.Namespace) -> int:
    """a shell on the login host, or the command after --"""
    cluster = load(arguments.name)
    words = arguments.words or [shutil.which(os.environ.get("SHELL", "")) or "/bin/sh"]
    command = on_login_host(cluster, words)
    os.execvpe(command[0], command, user_environment(cluster))


def network(arguments: argparse.Namespace) -> int:
    """cut or restore the network of a node"""
    cluster = load(arguments.name)
    if arguments.node not in cluster.node_names:
        raise ClusterError(f"there is no node {arguments.node}: choose from {', '.join(cluster.node_names)}.")
    if not cluster.hosts:
        raise ClusterError("all nodes are on this host, so that none has a network of its own to cut.")
    cable = on_login_host(cluster, ["ip", "link", "set", arguments.node, arguments.state])
    try:
        subprocess.run(cable, env=user_environment(cluster), check=True)
        if arguments.state == "up":
            # On this signal slurmd reports to slurmctld, which asks a node that is down rarely by itself.
            slurmd = processes.first(cluster.name, f"slurmd-{arguments.node}")
            if not slurmd:
                raise ProcessLookupError
            os.kill(slurmd, signal.SIGHUP)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ClusterError(f"{arguments.node} has crashed: take {cluster.name} down and up again.") from error
    return 0


def down(arguments: argparse.Namespace) -> int:
    """stop the cluster and remove all of it"""
    name = arguments.name
    if os.environ.get("SLURM_CONF") == str(slurm_conf(name)):
        raise ClusterError(f"this is a shell of {name}, which would end too: leave it first, with exit.")
    if not folder(name).exists():
        tell(f"{name} is not up.")
        return 0
    with lock(name):
        remove(name)
    tell(f"{name} is down.")
    return 0


def load(name: str) -> Cluster:
    """Return the cluster that is up; raise a ClusterError if there is none."""
    check_folder(name)
    if not (folder(name) / "ready").exists():
        raise ClusterError(f"{name} is not up: start it with `up`, or choose a different --name.")
    return Cluster.load(name)


def description(cluster: Cluster) -> list[str]:
    where = "every node is a host of its own" if cluster.hosts else "all nodes are on this host"
    if cluster.mbit:
        where += f", with a network of {cluster.mbit} Mbit/s"
    gpus = "They are virtual: what trains in them runs on the CPU."
    if not (cluster.hosts or config.can_prepare_tasks(cluster)):
        gpus = "If this machine has GPUs, jobs use those: this release of Slurm cannot hide them here."
    option = "" if cluster.name == "practice" else f" --name {cluster.name}"
    return [
        f"{cluster.name} is up, with Slurm {cluster.version}: {', '.join(cluster.node_names)}; {where}.",
        f"GPUs: {cluster.gpus} per node. {gpus}",
        f"Accounting (sacct): {'on' if cluster.accounting else 'off'}.",
        f"Next: {Path(sys.argv[0])} shell{option}",
    ]


def on_login_host(cluster: Cluster, command: list[str]) -> list[str]:
    """Return the command line that runs `command` on the login host, in the current folder.

    Raises ClusterError if there is no login host or no current folder any more.
    """
    try:
        here = Path.cwd()
    except OSError as error:
        raise ClusterError(
            f"the current folder cannot be used ({error.strerror}): go to another one."
        ) from error
    return [*processes.entrance(cluster), "env", f"--chdir={here}", *command]


def user_environment(cluster: Cluster) -> dict[str, str]:
    path = f"{cluster.folder}/bin:{os.environ.get('PATH', software.SYSTEM_PATH)}"
    # Nodes and jobs share the machine's cores: a thread that waits gives its core to others in place of
    # spinning on it. sbatch and srun pass this on to the jobs.
    environment = {"OMP_WAIT_POLICY": "passive"} | os.environ
    return environment | {"PATH": path, "SLURM_CONF": str(slurm_conf(cluster.name))}


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Make the cluster's folder and lock it; raise a ClusterError if another command has the lock."""
    try:
        with suppress(FileExistsError):
            folder(name).mkdir(mode=0o700)
        check_folder(name)
        holder = os.open(folder(name), os.O_RDONLY)
    except OSError as error:
        raise ClusterError(f"cannot make {folder(name)} ({error.strerror}).") from error
    try:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ClusterError(
            f"another command is starting or stopping {name}: wait until it is done."
        ) from error
    finally:
        os.close(holder)


def remove(name: str) -> None:
    clear(name)
    folder(name).rmdir()


def clear(name: str) -> None:
    """End the cluster's processes, with which its network ends, and empty its folder.

    Raises ClusterError if something in it cannot be removed.
    """
    processes.kill(name)
    try:
        for entry in folder(name).iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise ClusterError(f"{error.filename} cannot be removed ({error.strerror}): remove it.") from error


def prepare(arguments: argparse.Namespace) -> Cluster:
    """Get the software and write the cluster's files."""
    slurm = software.Slurm(arguments.slurm)
    slurm.ensure(accounting=not arguments.no_accounting)
    cluster = Cluster(
        name=arguments.name,
        slurm=arguments.slurm,
        version=slurm.version(),
        nodes=arguments.nodes,
        gpus=arguments.gpus,
        gpu_kind=arguments.gpu_kind or "",
        conf=arguments.conf or "",
        cpus=arguments.cpus,
        memory=max(machine_memory() // arguments.nodes, GPU_MEMORY_MB * max(arguments.gpus, 2)),
        hosts=arguments.mode != "one-host" and hosts_are_allowed(slurm, arguments),
        mbit=arguments.bandwidth,
        accounting=not arguments.no_accounting and slurm.has_accounting(),
        first_port=free_ports(arguments.name, config.FIRST_SLURMD_PORT + arguments.nodes),
    )
    config.write(cluster)
    return cluster


def hosts_are_allowed(slurm: software.Slurm, arguments: argparse.Namespace) -> bool:
    """Return whether this user may make hosts; raise a ClusterError if they are requested and not allowed."""
    attempt = "mount -t tmpfs tmpfs /dev/shm && ip link add type bridge && ip link add type veth"
    if arguments.bandwidth:
        attempt += " && tc qdisc add dev veth0 root tbf rate 1mbit burst 70kb latency 50ms"
    command = ["unshare", *processes.NAMESPACES, "sh", "-c", attempt]
    environment = os.environ | {"PATH": slurm.search_path()}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        refusal = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError:
        refusal = "there is no unshare"
    if refusal and arguments.bandwidth:
        raise ClusterError(
            f"nodes cannot have a slow network here ({refusal}): be root, or leave out --bandwidth."
        )
    if refusal and arguments.mode == "hosts":
        raise ClusterError(
            f"nodes cannot be hosts of their own here ({refusal}): be root, or use --mode one-host."
        )
    return not refusal


def machine_memory() -> int:
    """In MB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20


def free_ports(name: str, count: int) -> int:
    """Return the first of `count` ports in a row that nothing listens on."""
    # Every name starts its search elsewhere, so that clusters started at the same time do not meet.
    rows = len(PORTS) // count
    start = zlib.crc32(f"{os.getuid()} {name}".encode()) % rows
    for row in range(rows):
        first = PORTS[(start + row) % rows * count]
        if all(is_free(port) for port in range(first, first + count)):
            return first
    raise ClusterError(f"there are no {count} free ports in a row between {PORTS[0]} and {PORTS[-1]}.")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def start(cluster: Cluster) -> None:
    """Start init.py, detached from this terminal, and wait until the nodes are ready.

    Raises StartError if they never are.
    """
    command = [sys.executable, str(HERE / "init.py"), cluster.name]
    if cluster.hosts:
        login = [str(HERE / "login.sh"), str(cluster.folder / "hosts"), cluster.login_address]
        command = ["unshare", *processes.NAMESPACES, *login, *command]
    variables = {
        "PATH": f"{cluster.folder}/bin:{software.SYSTEM_PATH}",
        "SLURM_CONF": str(slurm_conf(cluster.name)),
        "MYSQL_UNIX_PORT": str(cluster.folder / "mariadb.socket"),  # for slurmdbd
    }
    with (cluster.folder / "log" / "init.log").open("w") as output:
        init = subprocess.Popen(
            command,
            cwd="/",  # where it stays; the current folder may be deleted
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=variables,
            start_new_session=True,
        )
    while not (cluster.folder / "ready").exists():
        if init.poll() is not None:
            raise StartError(last_words(cluster))
        time.sleep(0.02)


def last_words(cluster: Cluster) -> str:
    """Return the last line that init.py has written: why a daemon did not start."""
    lines = (cluster.folder / "log" / "init.log").read_text().splitlines()
    return lines[-1] if lines else "its first process was killed"


def tell(*lines: str) -> None:
    """Print, and go on even if that fails: `| head` has ended, or the disk is full."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stop(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    try:
        sys.exit(main())
    except ClusterError as error:
        sys.exit(f"error: {error}")
    except FileNotFoundError as error:
        sys.exit(f"error: there is no {os.fsdecode(error.filename)}: add its folder to PATH.")
    except KeyboardInterrupt:
        sys.exit(130)
