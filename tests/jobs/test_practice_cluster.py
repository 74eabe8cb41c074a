"""The practice cluster: a real Slurm that comes up, works, and leaves nothing behind."""

import json
import os
import pwd
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from checkout import copy_project
from cluster import PROGRAM, SLURM, RunningCluster, run_program, running_cluster
from conftest import ENVIRONMENT, NO_CLUSTER, REPOSITORY, ran, succeeded

from manygpus.jobs.doctor.findings import size_in_words
from manygpus.record.records import read_all_reduce

DAEMON = pwd.getpwnam("daemon").pw_uid  # newer Slurm (seen: 26.05) refuses nobody
BYTES_PER_S = 100e6 / 8
AT_ONCE = 70 * 2**10  # what may pass without waiting after a pause


def traces(name: str) -> list[str]:
    """What is left of a cluster: its folder and its processes. Its network and mounts live in those."""
    here = f"practice-cluster-{os.getuid()}-{name}"
    listed = subprocess.run(["ps", "-eww", "-o", "args="], capture_output=True, text=True).stdout
    running = [line for line in listed.splitlines() if here in line or f"init.py {name}" in line]
    return running + [str(folder) for folder in Path("/tmp").glob(here)]


def network_links() -> set[str]:
    return {link.name for link in Path("/sys/class/net").iterdir()}


def starting(name: str) -> subprocess.Popen:
    """An `up` that has got as far as starting daemons."""
    arguments = [sys.executable, PROGRAM, "up", "--slurm", SLURM, "--name", name]
    started = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = Path(f"/tmp/practice-cluster-{os.getuid()}-{name}/log/munged.log")
    deadline = time.monotonic() + 60
    while not log.exists():
        if started.poll() is not None:
            pytest.skip(f"{NO_CLUSTER}{started.stderr.read()}")
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return started


def copy_program(folder: Path, *, packages: bool) -> Path:
    """Return cluster.py of a copy of the practice cluster, with the release under test if it is unpacked."""
    unpacked = PROGRAM.parent / "packages" / SLURM
    ignored = shutil.ignore_patterns("packages", "packages.lock", "unpacking-*", "__pycache__")
    shutil.copytree(PROGRAM.parent, folder, ignore=ignored, dirs_exist_ok=True)
    if packages and unpacked.exists():
        shutil.copytree(unpacked, folder / "packages" / SLURM, symlinks=True)
    return folder / PROGRAM.name


def test_it_says_which_slurm_is_up(cluster: RunningCluster) -> None:
    version = cluster.run(["srun", "--version"]).stdout.split()[-1]
    assert f"Slurm {version}" in run_program("status", "--name", cluster.name).stdout
    assert SLURM in ("own", "newest") or version.startswith(SLURM)


def test_a_job_keeps_its_environment_and_its_exit_code(cluster: RunningCluster) -> None:
    """It gets no library path of Slurm's, and its threads do not spin, as all nodes share the cores."""
    command = 'test -z "$LD_LIBRARY_PATH" && test "$WORD $OMP_WAIT_POLICY" = "two words passive" && exit 7'
    done = cluster.run(["srun", "sh", "-c", command], env={"WORD": "two words"})
    assert done.returncode == 7


def test_a_task_is_prepared(cluster: RunningCluster, tmp_path: Path) -> None:
    """It is bound to its CPUs, and finds Slurm whatever its environment."""
    if "task_prolog" not in cluster.run(["scontrol", "show", "config"]).stdout:
        pytest.skip("this version of Slurm cannot prepare tasks here")
    number = cluster.submit("--export=NONE", "--output", tmp_path / "log", "--wrap", "srun nproc")
    assert cluster.wait(number)["JobState"] == "COMPLETED"
    assert (tmp_path / "log").read_text() == "1\n"


def test_accounting_remembers_a_failed_job(cluster: RunningCluster, tmp_path: Path) -> None:
    number = cluster.submit("--output", tmp_path / "log", "--wrap", "exit 3")
    assert cluster.wait(number)["ExitCode"] == "3:0"
    deadline = time.monotonic() + 120
    sacct = ["sacct", "-nPX", "--format=State,ExitCode", "--jobs", number]
    while (state := cluster.run(sacct).stdout.strip()) != "FAILED|3:0":
        assert time.monotonic() < deadline, state
        time.sleep(0.5)


def test_a_cancelled_job_leaves_no_process(cluster: RunningCluster, tmp_path: Path) -> None:
    """Not even one that ignores SIGTERM and whose parent has ended."""
    mark = f"9{os.getpid()}"
    stray = f"(setsid bash -c 'trap \"\" TERM; sleep {mark}; true' &); sleep {mark}"
    number = cluster.submit("--output", tmp_path / "log", "--wrap", stray)
    assert cluster.wait(number, until="RUNNING")["JobState"] == "RUNNING"
    time.sleep(1)
    cluster.run(["scancel", number])
    assert cluster.wait(number)["JobState"] == "CANCELLED"
    deadline = time.monotonic() + 120
    while subprocess.run(["pgrep", "--full", f"sleep {mark}"], capture_output=True).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_too_much_memory_ends_a_job(cluster: RunningCluster) -> None:
    hungry = "import time; x = bytearray(300 * 2**20); time.sleep(30)"
    done = cluster.run(["srun", "--mem=100", sys.executable, "-c", hungry])
    assert done.returncode != 0
    assert "exceeded memory limit" in done.stderr.lower()


def test_a_network_can_be_cut(cluster: RunningCluster) -> None:
    def answers() -> bool:
        connect = "import socket; socket.create_connection(('n2', 9), timeout=1)"
        # A node that can be reached refuses the connection; one that cannot does not answer.
        return "refused" in cluster.run([sys.executable, "-c", connect]).stderr

    if cluster.run(["hostname"]).stdout != "login\n":
        pytest.skip("the nodes of this cluster are not hosts of their own")
    assert answers()
    cluster.link("n2", up=False)
    assert not answers()
    cluster.link("n2", up=True)
    deadline = time.monotonic() + 120
    while not answers():
        assert time.monotonic() < deadline


def test_only_a_process_of_the_cluster_gets_its_signals(cluster: RunningCluster) -> None:
    """Whatever number stands where slurmd notes its own."""
    if cluster.run(["hostname"]).stdout != "login\n":
        pytest.skip("the nodes of this cluster are not hosts of their own")
    note = Path(f"/tmp/practice-cluster-{os.getuid()}-{cluster.name}/slurmd-n1.pid")
    good, other = note.read_text(), subprocess.Popen(["/bin/sleep", "300"], env={})
    try:
        for number in (str(other.pid), "9" * 30):
            note.write_text(number)
            done = run_program("network", "--name", cluster.name, "n1", "up")
            assert (done.returncode, done.stderr.count("n1 has crashed")) == (1, 1), done.stderr
        assert other.poll() is None
    finally:
        note.write_text(good)
        other.kill()
        other.wait()


def test_a_node_knows_the_names_of_its_callers(cluster: RunningCluster) -> None:
    """Also by IPv6, as PyTorch's store asks; without an answer it warns in the log of every job."""
    if cluster.run(["hostname"]).stdout != "login\n":
        pytest.skip("the nodes of this cluster are not hosts of their own")
    addresses = [(f"::ffff:10.10.10.{number}", 1) for number in (1, 100, 101)]
    ask = f"import socket; print(*(socket.getnameinfo(address, 0)[0] for address in {addresses}))"
    done = cluster.run(["srun", sys.executable, "-c", ask])
    names = [name.removesuffix(".mapped") for name in done.stdout.split()]  # glibc 2.41 answers without it
    assert names == ["login", "n1", "n2"], done.stderr


def test_it_is_up_once_and_not_left_from_within(cluster: RunningCluster) -> None:
    again = run_program("up", "--name", cluster.name)
    assert (again.returncode, again.stdout) == (1, "")
    assert "is up already" in again.stderr
    within = cluster.run([sys.executable, PROGRAM, "down", "--name", cluster.name])
    assert within.returncode == 1
    assert "leave it first" in within.stderr


def test_two_clusters_and_one_that_shares_the_host(cluster: RunningCluster) -> None:
    """A second one next to the first, in the other mode, of the machine's own Slurm; then it is all gone."""
    with running_cluster("--mode", "one-host", slurm="own", nodes=1, gpus=0) as other:
        tell = ["srun", "sh", "-c", "echo $SLURMD_NODENAME ${CUDA_VISIBLE_DEVICES-none}"]
        done = other.run(["env", "--unset=CUDA_VISIBLE_DEVICES", *tell])  # these tests have it themselves
        # A leading -1 hides all GPUs, the machine's too. Some releases of Slurm cannot set it.
        are_virtual = "They are virtual" in run_program("status", "--name", other.name).stdout
        assert done.stdout.startswith("n1 -1") == are_virtual, done.stdout + done.stderr
        cut = run_program("network", "--name", other.name, "n1", "down")
        assert cut.returncode == 1
        assert "all nodes are on this host" in cut.stderr
        assert cluster.run(["srun", "true"]).returncode == 0
        assert traces(other.name)
    assert not traces(other.name)


def test_communication_takes_as_long_as_the_network_lets_it(cluster: RunningCluster, tmp_path: Path) -> None:
    """For a sum over two ranks each sends all of its bytes."""
    if cluster.run(["hostname"]).stdout != "login\n":
        pytest.skip("the nodes of this cluster are not hosts of their own")
    checkout = tmp_path / "a checkout"
    copy_project(checkout)
    (checkout / ".venv").symlink_to(sys.prefix)
    checkup = checkout / "manygpus" / "jobs" / "doctor" / "checkup_torch.py"
    checkup.write_text(checkup.read_text().replace("SLOW_SECONDS = 1.0", "SLOW_SECONDS = 0.2"))
    with running_cluster("--bandwidth", "100mbit", gpus=1) as slow:
        status = run_program("status", "--name", slow.name).stdout
        shape = ("--nodes", 2, "--gpus", 2)
        done = slow.run([sys.executable, checkout / "slurm" / "doctor.py", "--json", "--job", *shape])
    assert "with a network of 100 Mbit/s" in status
    report = json.loads(done.stdout)
    (kept,) = (checkout / "results" / "all_reduce").iterdir()
    measured = {row["bytes"]: row["seconds"] for row in read_all_reduce(kept)}
    assert 2**18 in measured
    assert max(measured) <= 2**22, "a sum of 4 MB takes more than 0.2 s, so there is no larger one"
    for size, seconds in measured.items():
        assert seconds > (size - AT_ONCE) / BYTES_PER_S
    slower = [finding for finding in report["findings"] if "slower than gigabit" in finding["message"]]
    assert [finding["level"] for finding in slower] == ["warning"]
    assert f"GB/s at {size_in_words(max(measured))}" in slower[0]["message"]


@pytest.mark.full
def test_the_gpus_of_the_machine_are_out_of_reach(tmp_path: Path) -> None:
    """No job opens their device files if nodes are hosts; every job can see that its own are virtual."""
    gpu = Path("/dev/kfd")  # AMD's: other tests, at the same time, would take one of NVIDIA for a GPU
    try:
        os.mknod(gpu, stat.S_IFCHR | 0o666, Path("/dev/zero").stat().st_rdev)
    except (PermissionError, FileExistsError) as error:
        pytest.skip(f"no device file can be made here: {error}")
    ask = f"head --bytes=1 {gpu} 2>/dev/null | wc --bytes; echo of $SLURM_CLUSTER_NAME"
    try:
        assert gpu.open("rb").read(1) == b"\0"
        with running_cluster("--mode", "hosts", nodes=1, gpus=1) as cluster:
            # No TaskProlog adds Slurm to PATH in 24.11.0 to .6.
            script = f"PATH=${{SLURM_CONF%/*}}/bin:$PATH; {ask}; srun --export=ALL sh -c '{ask}'"
            number = cluster.submit("--export=NONE", "--output", tmp_path / "log", "--wrap", script)
            assert cluster.wait(number)["JobState"] == "COMPLETED"
            on_login = cluster.run(["sh", "-c", ask])
    finally:
        gpu.unlink()
    assert (tmp_path / "log").read_text() == "0\nof practice\n" * 2
    assert on_login.stdout == "0\nof\n"


@pytest.mark.full
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_an_interrupted_start_leaves_nothing(sign: signal.Signals) -> None:
    name = f"test-{os.getpid()}-interrupted-{sign}"
    links = network_links()
    started = starting(name)
    started.send_signal(sign)
    printed = started.communicate(timeout=60)
    if sign == signal.SIGINT:
        assert (started.returncode, *printed) == (130, "", "")
    else:
        assert traces(name)
        assert run_program("down", "--name", name).returncode == 0
    assert not traces(name)
    assert network_links() == links
    again = run_program("down", "--name", name)
    assert (again.returncode, again.stdout) == (0, f"{name} is not up.\n")


def test_an_ordinary_user_can_have_one(cluster: RunningCluster) -> None:
    """From a checkout whose path is long and has spaces."""
    if os.getuid() != 0:
        pytest.skip("not root: the other tests ran as an ordinary user")
    checkout = Path(tempfile.mkdtemp(prefix="practice cluster " + "long " * 20, dir="/tmp"))
    name = f"test-{os.getpid()}"
    as_daemon = {"user": DAEMON, "group": DAEMON, "extra_groups": [], "cwd": "/"}
    as_daemon["env"] = {"PATH": os.defpath}

    def run(*arguments: str) -> str:
        command = [python_for_everybody(as_daemon), checkout / PROGRAM.name, *arguments]
        done = succeeded(subprocess.run(command, **as_daemon, capture_output=True, text=True, timeout=120))
        return done.stdout

    try:
        copy_program(checkout, packages=True)
        for path in [checkout, *checkout.rglob("*")]:
            os.chown(path, DAEMON, DAEMON, follow_symlinks=False)
        run("up", "--slurm", SLURM, "--name", name)
        printed = run("shell", "--name", name, "--", "srun", "--nodes=2", "--gpus-per-node=1", "env")
        # Of the machine's GPUs, too, they shall see none.
        prepared = "task_prolog" in run("shell", "--name", name, "--", "scontrol", "show", "config")
        assert printed.count(f"CUDA_VISIBLE_DEVICES={'-1,' if prepared else ''}0\n") == 2
        assert "all nodes are on this host" in run("status", "--name", name)
        run("down", "--name", name)
        assert not Path(f"/tmp/practice-cluster-{DAEMON}-{name}").exists()
    finally:
        shutil.rmtree(checkout)


def python_for_everybody(as_daemon: dict[str, object]) -> str:
    for python in (sys.executable, "/usr/bin/python3"):
        check = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
        try:
            if subprocess.run(check, **as_daemon, capture_output=True).returncode == 0:
                return python
        except OSError:
            continue
    return pytest.skip("no Python 3.10 or newer that another user may run")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["up", "--nodes", "0"], "'0' is not a whole number from 1 to 16"),
        (["up", "--slurm", "25"], "'own', '22.05', '24.11', 'newest'"),
        (["up", "--name", "../x"], "is not 1 to 31 small letters"),
        (["up", "--gpu-kind", "a100:2"], "'a100:2' is not letters"),
        (["up", "--bandwidth", "fast"], "'fast' is not a rate from 1mbit to 1000mbit"),
        (["up", "--bandwidth", "10gbit"], "'10gbit' is not a rate from 1mbit to 1000mbit"),
        (["up", "--bandwidth", "9mbit", "--mode", "one-host"], "needs nodes that are hosts of their own"),
        (["status", "--name", "nowhere"], "nowhere is not up"),
        (["shell", "--name", "nowhere", "--", "true"], "nowhere is not up"),
        (["network", "--name", "nowhere", "n1", "down"], "nowhere is not up"),
        (["status", "--", "true"], "only shell takes a command"),
    ],
)
def test_mistakes_get_one_sentence(arguments: list[str], sentence: str) -> None:
    done = run_program(*arguments)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("fault", ["another user's", "open to other users", "no folder of its own"])
def test_a_folder_that_others_may_have_made_is_not_used(fault: str, tmp_path: Path) -> None:
    """Nor are the programs in it, whose turn it would be with every command."""
    name = f"test-{os.getpid()}-trap"
    folder, mark = Path(f"/tmp/practice-cluster-{os.getuid()}-{name}"), tmp_path / "mark"
    facts = {"nodes": 1, "gpus": 0, "cpus": 1, "memory": 1, "first_port": 7000, "slurm": "own"}
    facts |= {"name": name, "version": "22.05.8", "hosts": os.getuid() == 0, "mbit": 0, "accounting": False}
    place = tmp_path / "elsewhere" if fault == "no folder of its own" else folder
    (place / "bin").mkdir(mode=0o777 if fault == "open to other users" else 0o700, parents=True)
    place.chmod((place / "bin").stat().st_mode)
    (place / "ready").touch()
    (place / "cluster.json").write_text(json.dumps(facts))
    for program in ("env", "ip", "nsenter", "sh", "sinfo"):
        (place / "bin" / program).write_text(f"#!/bin/sh\ntouch {shlex.quote(str(mark))}\n")
        (place / "bin" / program).chmod(0o755)
    environment = {"SLURM_CONF": f"{folder}/slurm.conf"}
    first = subprocess.Popen(["/bin/sleep", "300"], env=environment)  # what init.pid has to name
    (place / "init.pid").write_text(f"{first.pid}\n")
    try:
        if fault == "another user's":
            if os.getuid() != 0:
                pytest.skip("not root: a folder cannot be given to another user")
            os.chown(place, DAEMON, DAEMON)
        if place != folder:
            folder.symlink_to(place)
        for words in (["status"], ["shell"], ["network", "n1", "down"], ["up"], ["down"]):
            done = run_program(words[0], "--name", name, *words[1:], stdin=subprocess.DEVNULL)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == f"error: {folder} is {fault}: choose a different --name, or remove it.\n"
        assert not mark.exists()
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
        if place != folder:
            folder.unlink()
        shutil.rmtree(place)


def test_a_damaged_note_of_a_cluster_is_told(cluster: RunningCluster) -> None:
    """And `down` needs no such note."""
    note = Path(f"/tmp/practice-cluster-{os.getuid()}-{cluster.name}/cluster.json")
    good = note.read_bytes()
    facts = json.loads(good)
    try:
        for text in ("{", json.dumps({fact: facts[fact] for fact in facts if fact != "gpus"})):
            note.write_text(text)
            done = cluster.run(["true"])
            assert (done.returncode, done.stderr) == (
                1,
                f"error: {note} is damaged: take {cluster.name} down, and up again.\n",
            ), text
    finally:
        note.write_bytes(good)


def test_a_damaged_folder_of_a_cluster_and_a_full_disk() -> None:
    name = f"test-{os.getpid()}-odd"
    folder = Path(f"/tmp/practice-cluster-{os.getuid()}-{name}")
    for make in (Path.mkdir, os.mkfifo):
        folder.mkdir(mode=0o700)
        make(folder / "init.pid")
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, PROGRAM, "down", "--name", name]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (done.returncode, done.stderr, folder.exists()) == (0, "", False)


def test_without_slurm_and_apt_it_says_so(tmp_path: Path) -> None:
    if shutil.which("slurmctld", path=f"{os.defpath}:/usr/sbin"):
        pytest.skip("Slurm is installed here")
    program = copy_program(tmp_path / "practice_cluster", packages=False)
    name = f"test-{os.getpid()}-bare"
    command = [sys.executable, program, "up", "--slurm", SLURM, "--name", name]
    done = ran(*command, env=ENVIRONMENT | {"PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert "no apt-get to fetch them with" in done.stderr
    assert not traces(name)


@pytest.mark.full
def test_a_configuration_that_the_controller_refuses_names_it(tmp_path: Path) -> None:
    """It ends while a node waits for it."""
    (tmp_path / "slurm.conf").write_text("PartitionName=practice Nodes=ALL\n")
    name = f"test-{os.getpid()}-twice"
    try:
        done = run_program("up", "--slurm", SLURM, "--name", name, "--no-accounting", "--conf", tmp_path)
    finally:
        run_program("down", "--name", name)
    assert done.returncode == 1
    assert "slurmctld ended" in done.stderr and "practice" in done.stderr


@pytest.mark.full
def test_without_accounting_it_is_up_all_the_same(tmp_path: Path) -> None:
    """A broken database costs `sacct`, and no job."""
    program = copy_program(tmp_path / "practice_cluster", packages=True)
    programs = program.parent / "packages" / SLURM / "usr"
    if not programs.exists():
        pytest.skip("Slurm is installed here")
    # This one does not know the option -D, and tells of --help.
    shutil.copy(programs / "bin" / "sinfo", programs / "sbin" / "slurmdbd")
    name = f"test-{os.getpid()}-accounting"
    try:
        done = succeeded(ran(sys.executable, program, "up", "--slurm", SLURM, "--name", name))
        assert "Accounting (sacct): off.\n" in done.stdout and "--help" in done.stdout
        assert run_program("shell", "--name", name, "--", "srun", "true").returncode == 0
        running = traces(name)
    finally:
        run_program("down", "--name", name)
    assert [line for line in running if "slurmctld" in line]
    assert not [line for line in running if "mariadb" in line]


@pytest.mark.full
@pytest.mark.parametrize(("required", "code"), [("", 1), ("0", 0), ("1", 1)])
def test_a_run_of_tests_without_a_cluster_is_red(required: str, code: int, tmp_path: Path) -> None:
    """Though every test is skipped, and none fails: on a machine that should have one, with apt-get."""
    apt_get = tmp_path / "apt-get"
    apt_get.write_text("#!/bin/sh\nexit 1\n")
    apt_get.chmod(0o755)
    test = f"{__file__}::test_a_job_keeps_its_environment_and_its_exit_code"
    no_slurm = {"PRACTICE_SLURM": "unheard of", "REQUIRE_CLUSTER": required}
    no_slurm["PATH"] = f"{tmp_path}:{ENVIRONMENT['PATH']}"
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n1", test)
    done = ran(*command, env=ENVIRONMENT | no_slurm, cwd=REPOSITORY)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("1 skipped" in done.stdout) == (required != "1"), done.stdout
    assert ("REQUIRE_CLUSTER=0" in done.stdout) == (required == ""), done.stdout
