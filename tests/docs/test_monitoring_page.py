"""slurm/MONITORING.md: what it says of each tool's columns, and that its outputs are what the tools print.

Its commands for Slurm are run by test_slurm_documents.py, the others by test_documents.py. What needs a GPU
is held to what one printed, or else to tests/layouts.txt, and run where there is one.
"""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from cluster import RunningCluster
from conftest import ENVIRONMENT, GPUS, REPOSITORY, WITH_GPUS, alone_with_the_gpus, ran, succeeded

from manygpus.monitor.findings import FINDINGS

PAGE = (REPOSITORY / "slurm" / "MONITORING.md").read_text()
RECORDED = REPOSITORY / "results" / "sample" / "h100" / "nvidia_smi.txt"
LAYOUTS = REPOSITORY / "tests" / "layouts.txt"
EXPERIMENT = REPOSITORY / "slurm" / "experiments" / "looks_busy.py"


def plain(text: str) -> str:
    """Without the escape codes that underline, which `topo -m` also writes into a pipe."""
    return re.sub(r"\x1b\[\d*m", "", text)


def reduced(command: str) -> str:
    """Without what only says when, how often, for how long and whereto."""
    command = re.sub(r"^watch -n 1 ", "", re.split(r" > |  # ", command)[0])
    return re.sub(r" -[cdl] \d+", "", command).strip()


def _sessions(file: Path) -> dict[str, list[str]]:
    """What each command printed, by the command; of several times the last."""
    _, *parts = re.split(r"^\$ (.*)\n", plain(file.read_text()), flags=re.MULTILINE)
    commands, outputs = parts[::2], parts[1::2]
    sessions = {}
    for command, output in zip(commands, outputs, strict=True):
        sessions[reduced(command)] = output.rstrip("\n").split("\n")
    return sessions


WRITTEN = _sessions(LAYOUTS)
SESSIONS = _sessions(RECORDED) | WRITTEN
# Those that are not run as they stand.
FENCED = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
BLOCKS = [block for language, block in FENCED if not language]


def _drawn_outputs() -> dict[str, list[str]]:
    """The outputs that the page shows below their commands."""
    outputs = {}
    for block in BLOCKS:
        first, *lines = block.rstrip("\n").split("\n")
        if first.startswith("$ "):
            outputs[first.removeprefix("$ ")] = lines
    return outputs


DRAWN = _drawn_outputs()
QUERY = next(name for name in WRITTEN if "--query-gpu" in name)


def _commands() -> set[str]:
    """Those of the page that need a GPU, or a tool that is not everywhere."""
    lines = [line.removeprefix("$ ") for block in BLOCKS for line in block.splitlines()]
    written = [line for line in lines if line.startswith(("nvidia-smi", "watch -n", "htop", "seff"))]
    written += re.findall(r"`((?:watch -n 1 )?(?:nvidia-smi|seff)[^`]*)`", PAGE)
    return set(map(reduced, written))


COMMANDS = _commands()


def explained(heading: str) -> set[str]:
    """The words in the first column of the first table below a heading, or below a line that begins so."""
    below = PAGE[re.search(rf"^{re.escape(heading)}", PAGE, re.MULTILINE).end() :]
    table = re.search(r"^\| (?:column|word|line|kind) \|.*\n\|---.*\n((?:\|.*\n)+)", below, re.MULTILINE)[1]
    cells = [line.split(" | ")[0].strip("| ") for line in table.splitlines()]
    return {name.strip("` ") for cell in cells for name in cell.split(", ")}


def test_every_finding_of_a_verdict_is_explained() -> None:
    assert explained("## The verdict of a job") == {finding.kind for finding in FINDINGS}


def test_every_command_for_a_gpu_has_a_layout() -> None:
    assert {*WRITTEN} < COMMANDS <= {*SESSIONS}


def test_the_columns_that_decide_are_those_of_the_tools() -> None:
    """The one table of the page has a column of names for each of the three commands."""
    rows = re.search(r"^\| nvidia-smi \| dmon \|.*\n\|---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)[1]
    cells = [line.strip("|").split("|") for line in rows.splitlines()]
    of_screen, of_dmon, of_query = (
        {name for row in cells for name in re.findall(r"`([^`]+)`", row[column])} for column in range(3)
    )
    screen = "\n".join(SESSIONS["nvidia-smi"])
    assert {"Pwr:Usage/Cap", "GPU-Util"} <= of_screen
    assert not [name for name in of_screen if name not in screen]
    assert {"pwr", "sm"} <= of_dmon <= {*SESSIONS["nvidia-smi dmon"][0].lstrip("# ").split()}
    printed = [name.partition(" [")[0] for name in SESSIONS[QUERY][0].split(", ")]
    asked = re.search(r"--query-gpu=(\S+)", QUERY)[1].replace("clocks.sm", "clocks.current.sm")
    assert printed == asked.split(",")
    assert of_query == {*printed} - {"timestamp"}


def test_the_words_of_topo_are_explained() -> None:
    lines = SESSIONS["nvidia-smi topo -m"]
    legend = {match[1] for line in lines if (match := re.match(r"  (\S+)\s+= ", line))}
    assert explained("### nvidia-smi topo") == (legend - {"NV#"}) | {"NV12"}
    assert "`NV#`" in PAGE
    for heading in lines[0].split("\t")[2:]:
        assert f"`{heading}`" in PAGE.replace("\n", " "), heading
    known = legend | {"NV12"}
    rows = [line.split("\t") for line in DRAWN["nvidia-smi topo -m"][1:]]
    assert all(cell.strip() in known for row in rows for cell in row[1:6])


def test_the_lines_of_seff_are_explained() -> None:
    printed = {line.partition(":")[0] for line in SESSIONS["seff <job>"]}
    assert explained("None of these shows") <= printed


def test_the_columns_of_slurm_are_explained() -> None:
    asked = re.findall(r"^s(?:stat|acct) .*--format=(\S+)", PAGE, re.MULTILINE)
    fields = {re.sub(r"%\d+", "", field) for fields in asked for field in fields.split(",")}
    assert explained("## From the login node") == fields


def test_the_columns_of_top_and_htop_are_there() -> None:
    done = succeeded(ran("top", "-b", "-n", "1"))
    headings = next(line.split() for line in done.stdout.splitlines() if "PID" in line.split())
    columns = {name for name in explained("## The CPUs") if "htop" not in name}
    assert columns == {"%CPU", "RES", "SHR", "S"}
    assert columns <= {*headings}
    of_htop = re.split(r"[\s▽△]+", SESSIONS["htop -u $USER"][0].strip())
    assert {"CPU%", "RES", "SHR", "S"} <= {*of_htop}


@pytest.mark.parametrize("command", DRAWN)
def test_a_drawn_output_has_the_layout(command: str) -> None:
    """What was recorded stands there as it was; of the rest, the headings are the tool's own."""
    drawn = DRAWN[command]
    layout = [line.rstrip() for line in SESSIONS[command]]
    if "topo" in command:  # of more GPUs
        assert drawn[0].split("\t")[-3:] == layout[0].split("\t")[-3:]
    else:
        assert drawn == layout[-len(drawn) :]


def experiment(*arguments: object, env: dict[str, str] = ENVIRONMENT) -> str:
    return succeeded(ran(sys.executable, EXPERIMENT, *arguments, env=env)).stdout


def measured(output: str) -> dict[str, tuple[float, float]]:
    """How busy each way looks, %, and what it has done per second."""
    rows = re.findall(r"^(\w+): .* ([\d,]+) % +(?:-|[\d,]+ W) +([\d,]+)$", output, re.MULTILINE)
    return {way: (float(busy), float(products.replace(",", ""))) for way, busy, products in rows}


@pytest.mark.full
def test_a_wait_that_spins_looks_as_busy_as_work() -> None:
    output = experiment("--seconds", 3)
    quoted = (REPOSITORY / "results" / "sample" / "h100" / "looks_busy.txt").read_text()  # of the picture
    assert quoted.splitlines()[0][42:] == output.splitlines()[0][42:]
    assert [line[:42] for line in quoted.splitlines()[1:]] == [line[:42] for line in output.splitlines()[1:]]
    for ways in (measured(output), measured(quoted)):
        assert ways["wait"][0] < 20 and ways["wait"][1] == 0
        assert ways["spin"][0] > 2 * ways["wait"][0] and ways["spin"][1] == 0
        assert ways["work"][1] > 0


def test_a_shell_in_a_running_job(cluster: RunningCluster) -> None:
    """The one command of the page that needs a terminal."""
    if not shutil.which("script"):
        pytest.skip("no `script`, which makes a terminal")
    (command,) = (line for block in BLOCKS for line in block.splitlines() if line.endswith("--pty bash"))
    job = cluster.submit("--wrap", "sleep 100", "--ntasks=1", "--mem=100", "--output=/dev/null")
    node = cluster.wait(job, until="RUNNING")["NodeList"]
    command = command.replace("<job>", str(job)).replace("<node>", node)
    inside = f"script -qec {shlex.quote(command)} /dev/null <<< 'echo in job $SLURM_JOB_ID; exit'"
    try:
        done = cluster.run(["bash", "-c", inside], timeout=60)
    finally:
        cluster.run(["scancel", job])
    assert f"in job {job}" in done.stdout, done.stdout + done.stderr


needs_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a GPU")]


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=needs_a_gpu) for name in sorted(COMMANDS) if name.startswith("nvidia-smi")],
)
def test_a_gpu_prints_the_layout(command: str) -> None:
    """Only the headings. Drivers before 535 have fewer."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = ran(*ask).stdout
    if int(driver.partition(".")[0]) < 535:
        pytest.skip(f"driver {driver.strip()}")
    goes_on = command.endswith(" dmon")
    arguments = shlex.split(command)
    if goes_on:
        arguments += ["-c", "1"]
    with alone_with_the_gpus():
        done = succeeded(ran(*arguments, timeout=60))
    printed = plain(done.stdout).splitlines()
    layout = SESSIONS[command]
    if goes_on or command == QUERY:
        assert printed[0].split() == layout[0].split()
    elif "topo" in command:
        assert printed[0].split("\t")[-3:] == layout[0].split("\t")[-3:]
    else:
        assert _headings(layout) <= _headings(printed)


def _headings(lines: list[str]) -> set[str]:
    """The lines with names that every driver prints."""
    names = ("Active", "Persistence-M", "Pwr:")
    return {line.partition(" :")[0].strip() for line in lines if any(name in line for name in names)}


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
def test_a_kernel_that_does_nothing_looks_as_busy_as_work() -> None:
    with alone_with_the_gpus():
        output = experiment("--seconds", 5, env=ENVIRONMENT | WITH_GPUS)
    ways = measured(output)
    watts = {way: float(power) for way, power in re.findall(r"^(\w+): .*? (\d+) W", output, re.MULTILINE)}
    assert ways["wait"][0] < 20
    assert ways["spin"][0] > 90 and ways["spin"][1] == 0
    assert ways["work"][0] > 90 and ways["work"][1] > 0
    assert watts["work"] > 1.5 * watts["spin"]
