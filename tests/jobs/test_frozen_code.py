"""Jobs and sweeps run their code as it was when they were sent, whatever the files say by then."""

import csv
import os
import re
from pathlib import Path

import pytest
from checkout import Checkout, commit_of, own_environment
from conftest import rows_of, succeeded

# Its package, a new module and a template are frozen with it. Data are read where they are. In its first
# start it asks to come back, and edits all of them before.
SCRIPT = """
import os, sys
from pathlib import Path
import package.part, new

job = Path(os.environ["MANYGPUS_JOB_DIR"])
template = Path(__file__).with_name("template.txt").read_text()
print("runs", "script 1", package.part.VERSION, new.VERSION, template, Path(sys.argv[1]).read_text())
print("reads", Path("data.txt").read_text(), Path(__file__).with_name("ignored.txt").read_text())
if not (job / "stopped-once").exists():
    (job / "stopped-once").touch()
    (job / "stopped").touch()
"""
# As setuptools writes it.
FINDER = """
import sys
from importlib.util import spec_from_file_location

MAPPING = {{"by_table": {!r}}}

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return spec_from_file_location(name, f"{{MAPPING[name]}}/__init__.py")

sys.meta_path.append(Finder)
"""
FROZEN = "runs script 1 part 1 new 1 template 1 config 1"


def write(project: Path, version: int = 1) -> Path:
    """Write the files of a project, or new versions of them, and return its script."""
    (project / "package").mkdir(parents=True, exist_ok=True)
    files = {"train.py": SCRIPT, "package/__init__.py": "", "package/part.py": "VERSION = 'part 1'"}
    files |= {"template.txt": "template 1", "config.yaml": "config 1", ".gitignore": "ignored.txt\n"}
    files |= {"data.txt": "data 1", "ignored.txt": "ignored 1"}
    for name, text in files.items():
        (project / name).write_text(text.replace(" 1", f" {version}"))
    return project / "train.py"


def make(project: Path) -> Path:
    """Make a repository with a new module that is not in it so far, and return its script."""
    script = write(project)
    commit_of(project)
    (project / "new.py").write_text("VERSION = 'new 1'")
    return script


def sent(checkout: Checkout, stage: str, *arguments: object, cwd: Path | None = None) -> int:
    """Send a job, and return its number."""
    done = succeeded(checkout.submit_py(stage, *arguments, cwd=cwd))
    return int(re.search(r"^job (\d+) submitted", done.stdout, re.MULTILINE)[1])


def log_of(checkout: Checkout, job: int) -> str:
    logs = (checkout.folder / "results" / "jobs" / "submitit").glob(f"*/{job}_*_log.out")
    return "".join(path.read_text() for path in logs)


@pytest.fixture
def busy(on_cluster: Checkout) -> int:
    """The number of a job that has both nodes, so that those that are sent have to wait."""
    nodes = ("--exclusive", "--nodes=2", "--output=/dev/null")
    job = on_cluster.cluster.submit(*nodes, "--wrap=sleep 600", cwd=on_cluster.folder)
    on_cluster.cluster.wait(job, until="RUNNING")
    return job


def test_a_script_that_is_edited_while_its_job_waits_and_before_it_comes_back(
    on_cluster: Checkout, busy: int, tmp_path: Path
) -> None:
    project = tmp_path / "a project"
    script = make(project)
    job = sent(on_cluster, "single", "--gpus", 1, "--plain", script.name, "config.yaml", cwd=project)
    write(project, version=2)
    (project / "new.py").rename(project / "newer.py")
    difference = succeeded(on_cluster.python("slurm/jobs.py", "--code", job)).stdout
    on_cluster.cluster.run(["scancel", busy])
    state = on_cluster.cluster.wait(job, timeout=300)
    log = log_of(on_cluster, job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), log
    assert log.count(f"{FROZEN}\n") == 2 and log.count("reads data 2 ignored 2\n") == 2, log
    # It was so before the job had begun, too.
    assert succeeded(on_cluster.python("slurm/jobs.py", "--code", job)).stdout == difference
    assert "\n-config 1\n+config 2\n" in difference and "\nnew.py\n" in difference
    assert difference.endswith("\nnewer.py\n")


def test_a_stage_runs_the_kit_as_it_was_when_it_was_sent(on_cluster: Checkout, busy: int) -> None:
    """Its script, the package and the job's own shell code; site.sh, data and results are those of today.

    So does its monitor, although the job's folder is that of the checkout.
    """
    site = "SITE_MONITOR=on\nactivate_environment() { unset PYTHONPATH; }"
    on_cluster.site(site)
    (on_cluster.folder / ".gitignore").write_text("results/jobs/\nresults/runs/\nslurm/site.sh\ndata\n")
    commit = commit_of(on_cluster.folder)
    small = ("--epochs", 1, "--width", 4, "--dataset", "synthetic", "--train-size", 200)
    job = sent(on_cluster, "single", "--gpus", 1, *small)
    for path in (on_cluster.script("single"), *(on_cluster.folder / "manygpus").glob("*.py")):
        path.write_text("raise SystemExit('edited')")
    on_cluster.job_env.write_text("exit 3")
    on_cluster.site(f"{site}\necho a site of today")
    on_cluster.cluster.run(["scancel", busy])
    state = on_cluster.cluster.wait(job, timeout=300)
    log = log_of(on_cluster, job)
    assert state["JobState"] == "COMPLETED" and "a site of today" in log, log
    assert re.search(f"^code    {commit} in {on_cluster.folder}, frozen in ", log, re.MULTILINE), log
    (row,) = rows_of(on_cluster.folder / "results")
    (copy,) = (on_cluster.folder / "results" / "jobs" / "submitit").glob("*/code")
    recorded = [row[name] for name in ("git_commit", "changed_files", "frozen_code")]
    assert recorded == [commit, 0, str(copy)]
    assert (on_cluster.folder / "results" / "jobs" / str(job) / "monitor" / "verdict.json").exists(), log


def test_modules_of_an_editable_install_and_a_shell_script(checkout: Checkout, tmp_path: Path) -> None:
    """An editable install puts a folder of the project on the path, or a table of packages in a module."""
    project, python = tmp_path / "a project", own_environment(tmp_path / "env")
    where = "import sys, by_path, by_table; print(by_path.__file__, by_table.__file__, sys.argv[0])"
    files = {"src/by_path/__init__.py": "", "by_table/__init__.py": "", "tools/train.py": where}
    files["run.sh"] = f'cd "$MANYGPUS_CODE_DIR" && {python} main_of_tools.py\n'
    files["main_of_tools.py"] = "print(__file__)"
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    commit_of(project)
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (packages / "project.pth").write_text(f"{project}/src\nimport __editable___project_finder\n")
    (packages / "__editable___project_finder.py").write_text(FINDER.format(str(project / "by_table")))

    def log_of(script: str) -> str:
        options = ("--local", "--wait", "--gpus", 1, "--python", python)
        succeeded(checkout.submit_py("single", *options, "--plain", script, cwd=project))
        folder = max((checkout.folder / "results" / "jobs" / "submitit").iterdir(), key=os.path.getmtime)
        return "".join(path.read_text() for path in folder.glob("*_0_log.out")).replace(str(folder), "")

    printed = log_of("tools/train.py")
    assert printed.startswith(
        "/code/src/by_path/__init__.py /code/by_table/__init__.py /code/tools/train.py\n"
    )
    assert log_of("run.sh").startswith("/code/main_of_tools.py\n")


# Of the runs of a sweep here, the first edits what the second would read.
EDITS = """
import sys
from pathlib import Path
import new

print(new.VERSION, Path(sys.argv[1]).read_text())
Path("new.py").write_text("VERSION = 'new 2'")
Path("config.yaml").write_text("config 2")
"""


def test_all_runs_of_a_sweep_run_the_same_code(checkout: Checkout, tmp_path: Path) -> None:
    """Also those that the same command adds later, unless they are to take today's."""
    project, sweep = tmp_path / "a project", tmp_path / "a sweep"
    make(project)
    (project / "train.py").write_text(EDITS)

    def last_lines(lrs: str, *options: str) -> dict[str, str]:
        options = ("--local", *options, "--out", sweep, "--vary", f"lr={lrs}")
        done = checkout.python("slurm/sweep.py", *options, "--plain", "train.py", "config.yaml", cwd=project)
        succeeded(done)
        with (sweep / "sweep.csv").open(newline="") as file:
            return {row["lr"]: row["last_line"] for row in csv.DictReader(file)}

    assert last_lines("1,2") == {"1": "new 1 config 1", "2": "new 1 config 1"}
    assert last_lines("1,2,3")["3"] == "new 1 config 1"
    assert last_lines("1,2,3,4", "--no-freeze")["4"] == "new 2 config 2"
