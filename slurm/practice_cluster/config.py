"""The files in a cluster's folder: the configuration of its daemons, and the commands for its users."""

import os
import pwd
import shlex
import shutil
import socket
import sys
from itertools import chain
from pathlib import Path

from software import COMMANDS, DAEMONS, OWN, Slurm
from state import Cluster, slurm_conf

HERE = Path(__file__).resolve().parent
# Offsets from the cluster's first port.
SLURMCTLD_PORT = 0
SLURMDBD_PORT = 1
FIRST_SLURMD_PORT = 2


def write(cluster: Cluster) -> None:
    """Write everything that the daemons of `cluster` need into its folder, which is empty."""
    for name in ("bin", "exec", "dev", "log", "spool", "slurmctld", "database", "tmp"):
        (cluster.folder / name).mkdir()
    (cluster.folder / "packages").symlink_to(Slurm(cluster.slurm).unpacked)
    _write_commands(cluster)
    (cluster.folder / "task_prolog.sh").symlink_to(HERE / "task_prolog.sh")
    (cluster.folder / "munge.key").write_bytes(os.urandom(128))
    (cluster.folder / "munge.key").chmod(0o600)
    (cluster.folder / "hosts").write_text(_hosts(cluster))
    write_slurm_conf(cluster)
    (cluster.folder / "gres.conf").write_text(_gres_conf(cluster))
    (cluster.folder / "cgroup.conf").write_text(_cgroup_conf(cluster))
    (cluster.folder / "slurmdbd.conf").write_text(_slurmdbd_conf(cluster))
    (cluster.folder / "slurmdbd.conf").chmod(0o600)
    if cluster.accounting:
        _write_database(cluster)
    if cluster.conf:
        for file in Path(cluster.conf).iterdir():
            if file.name != "slurm.conf":
                shutil.copy(file, cluster.folder)
    cluster.save()


def write_slurm_conf(cluster: Cluster) -> None:
    slurm_conf(cluster.name).write_text(_slurm_conf(cluster))


def _write_commands(cluster: Cluster) -> None:
    """Fill bin/ with the programs."""
    slurm = Slurm(cluster.slurm)
    for name in DAEMONS + COMMANDS:
        program = slurm.find(name)
        if not program:
            continue
        command = [str(program)]
        if program.is_relative_to(slurm.unpacked):
            # The link gives the process its name: without it `ps` would show slurmd-wlm.
            link = cluster.folder / "exec" / name
            link.symlink_to(program)
            command = [str(link)]
        if name == "slurmstepd":
            command = [sys.executable, "-I", "-S", str(HERE / "adopt.py"), *command]
        script = cluster.folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        script.chmod(0o755)


def _short(cluster: Cluster, path: Path) -> str:
    """Return the path; for an unpacked file through the cluster's link, without spaces and colons."""
    unpacked = Slurm(cluster.slurm).unpacked
    if not path.is_relative_to(unpacked):
        return str(path)
    return str(cluster.folder / "packages" / path.relative_to(unpacked))


def _hosts(cluster: Cluster) -> str:
    names = [("127.0.0.1", "localhost"), (cluster.login_address, "login")]
    names += [(cluster.node_address(node), node) for node in cluster.node_names]
    # PyTorch's store listens by IPv6, where a caller by IPv4 has such an address, and asks for its name.
    mapped = [(f"::ffff:{address}", f"{name}.mapped") for address, name in names]
    names += [("::1", "localhost"), *mapped]
    return "".join(f"{address} {name}\n" for address, name in names)


def _slurm_conf(cluster: Cluster) -> str:
    """Return slurm.conf (https://slurm.schedmd.com/slurm.conf.html)."""
    folder = cluster.folder
    login = "login" if cluster.hosts else socket.gethostname().partition(".")[0]
    user = _user()
    lines = f"""\
ClusterName=practice
SlurmctldHost={login}({cluster.login_address})
SlurmctldPort={cluster.first_port + SLURMCTLD_PORT}
SlurmUser={user}
SlurmdUser={user}
# A requeued job waits until the credential of its first run has expired: 5 s is the least that Slurm accepts.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/slurmctld
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/log/steps-%n.log
{_plugin_dir(cluster)}
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
{_task_prolog(cluster)}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# Nodes may have more CPUs and memory than the machine.
SlurmdParameters=config_overrides
DefMemPerCPU={cluster.memory // cluster.cpus}
# A job that uses more memory than it asked for is killed, as where cgroups limit it.
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
JobAcctGatherParams=UsePss,OverMemoryKill
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=30
InactiveLimit=0
KillWait=15
CompleteWait=0
# So many seconds a job that has ended is known to scontrol: 300 are too few for tests on a busy machine.
MinJobAge=1800
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
# A job of the partition urgent sends jobs of the others back to the queue, after their GraceTime.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
    if cluster.accounting:
        lines += f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={cluster.login_address}
AccountingStoragePort={cluster.first_port + SLURMDBD_PORT}
AccountingStoragePass={folder}/munge.socket
AccountingStorageTRES=gres/gpu
"""
    lines += _nodes(cluster)
    lines += "PartitionName=practice Nodes=ALL Default=YES DefaultTime=10 MaxTime=240 GraceTime=30\n"
    lines += "PartitionName=debug Nodes=ALL DefaultTime=5 MaxTime=15 GraceTime=30\n"
    lines += "PartitionName=urgent Nodes=ALL DefaultTime=10 MaxTime=240 PriorityTier=2 PreemptMode=OFF\n"
    more = Path(cluster.conf, "slurm.conf")
    if cluster.conf and more.exists():
        lines += more.read_text()  # of a setting that is there twice, Slurm takes the last
    return lines


def _nodes(cluster: Cluster) -> str:
    """Return the lines of slurm.conf for the nodes."""
    gres = ""
    if cluster.gpus:
        kind = f"{cluster.gpu_kind}:" if cluster.gpu_kind else ""
        gres = f" Gres=gpu:{kind}{cluster.gpus}"
    lines = ""
    for number, node in enumerate(cluster.node_names):
        hostname = node if cluster.hosts else "localhost"
        lines += (
            f"NodeName={node} NodeAddr={cluster.node_address(node)} NodeHostname={hostname} "
            f"Port={cluster.first_port + FIRST_SLURMD_PORT + number} "
            f"CPUs={cluster.cpus} Sockets=1 CoresPerSocket={cluster.cpus} ThreadsPerCore=1 "
            f"RealMemory={cluster.memory}{gres}\n"
        )
    return lines


def _user() -> str:
    """Return the user of the daemons: the caller, by name, or by number if the number has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _plugin_dir(cluster: Cluster) -> str:
    """Return the line that says where Slurm's plugins are, if some are not in its default place."""
    slurm = Slurm(cluster.slurm)
    unpacked = {plugin.parent for plugin in slurm.unpacked.glob("usr/lib/*/slurm*/*_*.so")}
    installed = {plugin.parent for plugin in Path("/usr/lib").glob("*/slurm*/*_*.so")}
    # Those that the machine has installed are of another release, unless the release is its own.
    used = sorted(unpacked)
    if slurm.name == OWN:
        used += sorted(installed)
    if not unpacked:
        return ""
    return f"PluginDir={':'.join(_short(cluster, folder) for folder in used)}"


def _gres_conf(cluster: Cluster) -> str:
    """Return gres.conf. A GPU is a device file for Slurm; any user may make a link to /dev/null."""
    if not cluster.gpus:
        return ""
    for number in range(cluster.gpus):
        (cluster.folder / "dev" / f"gpu{number}").symlink_to("/dev/null")
    numbers = f"[0-{cluster.gpus - 1}]"
    kind = f" Type={cluster.gpu_kind}" if cluster.gpu_kind else ""
    device = f"File={cluster.folder}/dev/gpu{numbers} Flags=nvidia_gpu_env"
    return f"AutoDetect=off\nName=gpu{kind} {device}\n"


def _cgroup_conf(cluster: Cluster) -> str:
    """Return cgroup.conf for no cgroups. Before 24.05 no setting says so, but v1 is off unless asked for."""
    if _version(cluster) >= (24, 5):
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n"


def can_prepare_tasks(cluster: Cluster) -> bool:
    """Return whether Slurm runs our TaskProlog. Some releases need slurmstepd for it, which is a script here.

    SchedMD's list of changes calls that a regression; it ended with 24.11.7 and 25.05.2.
    """
    version = _version(cluster)
    return not ((24, 11, 0) <= version < (24, 11, 7) or (25, 5, 0) <= version < (25, 5, 2))


def _task_prolog(cluster: Cluster) -> str:
    """Return the line that names the prolog, or nothing for a release that cannot run it."""
    return f"TaskProlog={cluster.folder}/task_prolog.sh" if can_prepare_tasks(cluster) else ""


def _version(cluster: Cluster) -> tuple[int, ...]:
    """Return Slurm's version in numbers, such as (22, 5, 8)."""
    return tuple(map(int, cluster.version.split(".")))


def _slurmdbd_conf(cluster: Cluster) -> str:
    """Return slurmdbd.conf (https://slurm.schedmd.com/slurmdbd.conf.html); the environment has the socket."""
    return f"""\
DbdHost={"login" if cluster.hosts else "localhost"}
DbdAddr={cluster.login_address}
DbdPort={cluster.first_port + SLURMDBD_PORT}
SlurmUser={_user()}
AuthType=auth/munge
AuthInfo=socket={cluster.folder}/munge.socket
PidFile={cluster.folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
{_plugin_dir(cluster)}
"""


def _write_database(cluster: Cluster) -> None:
    """Write a small, non-durable database, reachable only by its socket, in a folder private to its owner."""
    tables = _database_tables(cluster)
    (cluster.folder / "mariadb.cnf").write_text(f"""\
[mariadbd]
user={_user()}
datadir={cluster.folder}/database
# Not /tmp: a server that starts removes what looks like temporary tables there, another server's too.
tmpdir={cluster.folder}/tmp
socket={cluster.folder}/mariadb.socket
pid_file={cluster.folder}/mariadb.pid
lc_messages_dir={_short(cluster, tables.parent)}
skip_networking
skip_grant_tables
innodb_buffer_pool_size=16M
innodb_log_file_size=4M
innodb_flush_log_at_trx_commit=0
aria_log_file_size=8M
""")
    # slurmdbd would make its database itself, but with MariaDB 11.8.9's library no query succeeds after that.
    # The rest is what mariadb-install-db does, which knows no other place for the programs than the system's.
    sql = "create database slurm_acct_db;\ncreate database mysql;\nuse mysql;\n" + tables.read_text()
    (cluster.folder / "tables.sql").write_text(sql)


def _database_tables(cluster: Cluster) -> Path:
    """Return MariaDB's own list of the tables that every database starts with."""
    pattern = "m*/m*_system_tables.sql"  # of MariaDB or MySQL, as the release names it
    unpacked = (Slurm(cluster.slurm).unpacked / "usr" / "share").glob(pattern)
    return next(chain(unpacked, Path("/usr/share").glob(pattern)))
