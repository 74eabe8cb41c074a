"""The package alone, as `pip install` leaves it: a project that is not ours, and no checkout anywhere."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import lessons
import pytest
from checkout import commit_of, own_environment, wait_until
from cluster import RunningCluster
from conftest import ENVIRONMENT, REPOSITORY, one_error, ran, succeeded
from packaging.requirements import Requirement

from manygpus.jobs.submit import slurm_options

# It saves every step, handles no signal, and the first time it never ends. PyTorch's threads abort some of
# the runs that went well, on CPUs that are shared.
TRAIN = """
import argparse, os, time
import torch, torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--resume")
args = parser.parse_args()
dist.init_process_group("gloo")
first = torch.load(args.resume)["step"] + 1 if args.resume else 0
for step in range(first, first + 3):
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    if dist.get_rank() == 0:
        torch.save({"step": step}, "saved.pt")
        print("step", step, "of", int(ranks), "ranks with lr", args.lr, flush=True)
while not args.resume:
    time.sleep(1)
os._exit(0)
"""

# A step of the training of a new project. In its first start a job waits there for a signal.
STEP = "            optimizer.zero_grad()\n"
WAITS = """\
            if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" and not signals_received:
                print("waits", flush=True)
                while not signals_received:
                    time.sleep(0.1)
"""


def needed(requirements: list[str]) -> Iterator[str]:
    """What pip installs for these requirements without extras: their packages, and what those need."""
    for text in requirements:
        requirement = Requirement(text)
        if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name
            yield from needed(metadata.requires(requirement.name) or [])


def parameters_for_submitit(path: Path) -> dict[str, str]:
    """The arguments with which a file creates its executor and updates it, as code without comments."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = {ast.unparse(call.func): call for call in calls}
    keywords = (
        *named["submitit.AutoExecutor"].keywords,
        *named["executor.update_parameters"].keywords,
    )
    return {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}


def test_without_stages_a_job_is_sent_as_stage_03_sends_it() -> None:
    """The call is in two places, of which the stage explains it."""
    of_stage = parameters_for_submitit(REPOSITORY / "03_multigpu_ddp" / "submit.py")
    of_package = parameters_for_submitit(REPOSITORY / "manygpus" / "jobs" / "submit" / "executor.py")
    python_of_stage = ast.literal_eval(of_stage.pop("slurm_python"))
    assert python_of_stage == eval(of_package.pop("slurm_python"), vars(slurm_options))
    assert of_stage == of_package and "nodes" in of_stage


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves folders behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in lessons.files("pyproject.toml", "LICENSE", "manygpus/*"):
        copy = source / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    succeeded(ran(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", out, source, cwd=out))
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def manygpus(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, in an environment with what pip installs with the wheel, and nothing else."""
    environment = tmp_path_factory.mktemp("installed") / "env"
    python = own_environment(environment)
    linked = environment / "linked"
    linked.mkdir()
    (info,) = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    for name in {*needed(metadata.PathDistribution(info).requires)}:
        top_names = {file.parts[0] for file in metadata.files(name) if file.parts[0] != ".."}
        for top_name in top_names - {"__pycache__"}:
            (linked / top_name).symlink_to(metadata.distribution(name).locate_file(top_name))
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "linked.pth").write_text(f"{linked}\n")
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", python)
    succeeded(ran(*pip, "install", "--no-index", "--no-deps", wheel))
    assert ran(python, "-c", "import torch", env={}).returncode
    return environment / "bin" / "manygpus"


class Stranger:
    """A user on a login node, in a project with an environment that has PyTorch."""

    def __init__(self, home: Path, manygpus: Path, cluster: RunningCluster | None = None) -> None:
        self.project, self.manygpus, self.cluster = home / "a project", manygpus, cluster
        self.project.mkdir()
        (self.project / "train.py").write_text(TRAIN)
        self.python = own_environment(home / "env", with_torch=True)
        self.environment = {"PYTHONPATH": "", "XDG_CONFIG_HOME": str(home / "config")}

    def run(self, *words: object, folder: str = ".") -> subprocess.CompletedProcess:
        command = [self.manygpus, *words]
        where = {"cwd": self.project / folder}
        if not self.cluster:
            return ran(*command, env=ENVIRONMENT | self.environment | {"PATH": "/usr/bin:/bin"}, **where)
        # Behind the cluster's own settings.
        path = f"PATH={self.python.parent}:$PATH"
        assignments = [f"{name}={value}" for name, value in self.environment.items()]
        words = ["bash", "-c", f'{path} exec env "$@"', "bash", *assignments, *command]
        return self.cluster.run(list(map(str, words)), timeout=300, **where)


def test_a_job_of_a_strangers_script(manygpus: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    """It is killed at its time limit, comes back, and is judged; the commands know it in all its folders."""
    stranger = Stranger(tmp_path, manygpus, cluster)
    commit = commit_of(stranger.project)
    begun = succeeded(stranger.run("init")).stdout
    site = stranger.project / "slurm" / "site.sh"
    assert "0 fault(s)" in begun and str(stranger.python) in begun
    site.write_text(f"{site.read_text()}SITE_MONITOR=on\n")
    sent = succeeded(
        stranger.run(
            *("submit", "--gpus", 2, "--nodes", 2, "--time", 1, "--when-requeued", "--resume saved.pt"),
            *("train.py", "--lr", 0.1),
        )
    ).stdout
    job = int(re.match(r"job (\d+) submitted: 2 node\(s\), 2 process", sent)[1])
    (log,) = (stranger.project / "results" / "jobs" / "submitit").glob("train-*/")
    log /= f"{job}_0_log.out"
    wait_until(lambda: log.exists() and "step 2" in log.read_text())

    # Meanwhile.
    assert f"{job} " in succeeded(stranger.run("jobs", folder="slurm")).stdout
    planned = succeeded(stranger.run("sweep", "--dry-run", "--vary", "lr=1,2", "train.py", "--lr", "{lr}"))
    assert "python train.py --lr 2" in planned.stdout.replace(f"{stranger.project}/", "").replace("'", "")
    checked = succeeded(stranger.run("doctor", "--plain", "train.py")).stdout
    assert "imports at the top is installed" in checked and "0 fault(s)" in checked

    state = cluster.wait(job, timeout=300)
    text = log.read_text()
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), text
    assert "step 2 of 2 ranks with lr 0.1" in text and "step 5 of 2 ranks with lr 0.1" in text
    assert f"\npython  {stranger.python}\n" in text
    assert f"\ncode    {commit} with" in text
    assert re.search(rf"\ncode    manygpus {re.escape(metadata.version('manygpus'))} in ", text)
    assert "\nwatch   " in text
    succeeded(stranger.run("monitor", "--verdict", job))
    assert str(log) in succeeded(stranger.run("why", job)).stdout
    # Nothing of this is code of the project.
    status = succeeded(ran("git", "-C", stranger.project, "status", "--short")).stdout.split()
    assert {*status} == {"??", "saved.pt", "slurm/"}


def test_the_site_file_of_all_projects(manygpus: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    """It holds where a project has none, and a folder within a project is of that project."""
    stranger = Stranger(tmp_path, manygpus, cluster)
    of_all = tmp_path / "config" / "manygpus" / "site.sh"
    of_all.parent.mkdir(parents=True)
    without_torch = own_environment(tmp_path / "other").parent
    of_all.write_text(
        f"export SBATCH_PARTITION=urgent\nactivate_environment() {{ PATH='{without_torch}':$PATH; }}\n"
    )
    fault = f"{without_torch}/python has no PyTorch"
    assert fault in stranger.run("doctor").stdout
    inner = stranger.project / "inner"
    inner.mkdir()
    script = ("submit", "--gpus", 1, "--dry-run", "../train.py")
    shown = succeeded(stranger.run(*script, folder="inner")).stdout
    assert "#SBATCH --partition=urgent\n" in shown and f"{inner}/results" in shown
    (stranger.project / "slurm").mkdir()
    (stranger.project / "slurm" / "site.sh").write_text("export SBATCH_PARTITION=practice\n")
    shown = succeeded(stranger.run(*script, folder="inner")).stdout
    assert "#SBATCH --partition=practice\n" in shown and f"{inner}/results" not in shown
    # What is written next is left where it is read.
    (stranger.project / "slurm" / "site.sh").write_text("exit 1\n")
    assert "slurm/site.sh" in one_error(stranger.run(*script, folder="inner"))


def test_a_new_project_runs_at_once(manygpus: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    """In one process, and in two kinds of jobs, which stop and come back. A folder that is there stays."""
    stranger = Stranger(tmp_path, manygpus, cluster)
    assert "there already" in one_error(stranger.run("new", stranger.project))
    assert [path.name for path in stranger.project.iterdir()] == ["train.py"]
    made = succeeded(stranger.run("new", "my project")).stdout
    project = stranger.project = stranger.project / "my project"
    assert "0 fault(s)" in made and (project / "slurm" / "site.sh").exists()
    assert (project / "README.md").read_text().startswith("# my project\n")
    train = project / "train.py"
    text = train.read_text()
    for line, replacement in (("made_up_images(4000,", "made_up_images(200,"), (STEP, WAITS + STEP)):
        assert line in text
        text = text.replace(line, replacement)
    train.write_text(text)

    sent = succeeded(stranger.run("submit", "--gpus", 2, "train.py", "--num-workers", 0)).stdout
    (with_the_kit,) = map(int, re.findall(r"^job (\d+) submitted", sent))
    python = f"PATH={stranger.python.parent}:$PATH"
    sent = cluster.run(["bash", "-c", f"{python} sbatch --parsable job.sh --num-workers 0"], cwd=project)
    alone = int(succeeded(sent).stdout)
    logs = {with_the_kit: f"results/jobs/submitit/*/{with_the_kit}_*_log.out", alone: f"slurm-{alone}.out"}

    def log_of(job: int) -> str:
        return "".join(path.read_text() for path in project.glob(logs[job]))

    for job in logs:
        wait_until(lambda job=job: log_of(job).count("waits\n") == 2)
        cluster.run(["scancel", "--signal=USR2", job])
    here = ran(stranger.python, "train.py", cwd=project, env=ENVIRONMENT | {"SLURM_RESTART_COUNT": "1"})
    assert "epoch 2: " in succeeded(here).stdout
    for job in logs:
        state, printed = cluster.wait(job, timeout=300), log_of(job)
        assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), printed
        assert "saved and stopped in epoch 1" in printed and "epoch 1, 3 of 3 steps done" in printed
        assert len(re.findall(r"^epoch 2: ", printed, re.MULTILINE)) == 1, printed


def test_a_new_project_has_the_site_file_of_where_it_is(manygpus: Path, tmp_path: Path) -> None:
    """Not that of where the command was given. With one that is wrong nothing is made."""
    stranger = Stranger(tmp_path, manygpus)
    site = stranger.project / "all projects" / "slurm" / "site.sh"
    site.parent.mkdir(parents=True)
    site.write_text("SITE_GPUS=--gres=gpu:2\n")
    assert "SITE_GPUS" in one_error(stranger.run("new", "all projects/mine"))
    site.write_text("export SBATCH_PARTITION=urgent\nSITE_GPUS=--gres=gpu:a100:%d\n")
    assert "cd 'all projects/mine'" in succeeded(stranger.run("new", "all projects/mine")).stdout
    lines = (stranger.project / "all projects" / "mine" / "job.sh").read_text().splitlines()
    assert {"#SBATCH --partition=urgent", "#SBATCH --gres=gpu:a100:2"} <= {
        line.split("  ")[0] for line in lines
    }


def test_the_job_script_of_a_new_project_asks_as_its_site_wants(
    manygpus: Path, cluster: RunningCluster, tmp_path: Path
) -> None:
    """By the GPU, where a plain job script would not know the cores of a rank."""
    stranger = Stranger(tmp_path, manygpus, cluster)
    of_all = tmp_path / "config" / "manygpus" / "site.sh"
    of_all.parent.mkdir(parents=True)
    of_all.write_text(
        "SITE_GPUS=--gres=gpu:%d\nSITE_CPUS=--cpus-per-gpu=%d\nSITE_MEM=--mem-per-gpu=%dG\n"
        "export SBATCH_PARTITION=urgent\n"
    )
    assert str(of_all) in succeeded(stranger.run("new", "mine")).stdout
    project = stranger.project / "mine"
    (project / "train.py").write_text(
        'import os\nprint("rank", os.environ["RANK"], os.sched_getaffinity(0))\n'
    )
    python = f"PATH={stranger.python.parent}:$PATH"
    sent = cluster.run(["bash", "-c", f"{python} sbatch --parsable job.sh"], cwd=project)
    job = int(succeeded(sent).stdout)
    assert cluster.wait(job)["Partition"] == "urgent"
    log = (project / f"slurm-{job}.out").read_text()
    assert sorted(re.findall(r"rank (\d) {\d+, \d+}\n", log)) == ["0", "1"], log


@pytest.mark.parametrize(
    "settings", ["SITE_GPUS=--gres=gpu:2", "export SBATCH_PARTITON=gpu", "sleep 9 & exit 1"]
)
def test_what_is_wrong_in_the_site_file_of_all_projects_is_looked_for_there(
    settings: str, manygpus: Path, tmp_path: Path
) -> None:
    stranger = Stranger(tmp_path, manygpus)
    of_all = tmp_path / "config" / "manygpus" / "site.sh"
    of_all.parent.mkdir(parents=True)
    of_all.write_text(f"{settings}\n")
    shown = stranger.run("doctor").stdout
    assert str(of_all) in shown and "slurm/site.sh" not in shown


def test_the_scripts_own_options_stay_its_own(manygpus: Path, tmp_path: Path) -> None:
    """Though the command has options of these names. The command that resumes a sweep is one."""
    stranger = Stranger(tmp_path, manygpus)
    script = stranger.project / "said.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    command = ("sweep", "--gpus", 1, "said.py", "--out", "theirs", "--gpus", 7)
    first = succeeded(stranger.run(*command)).stdout
    (log,) = stranger.project.glob("results/sweeps/*/said-1gpu-r1/log.out")
    assert log.read_text() == "['--out', 'theirs', '--gpus', '7']\n"
    words = shlex.split(re.search("^resume +(.*)", first, re.MULTILINE)[1])
    resumed = succeeded(ran(*words, cwd=stranger.project, env=ENVIRONMENT | stranger.environment)).stdout
    assert "1 runs, 1 of them finished" in resumed
    assert re.search("^resume +(.*)", resumed, re.MULTILINE)[1] == shlex.join(words)


def test_what_is_missing_is_one_sentence(manygpus: Path, tmp_path: Path) -> None:
    """Slurm, a script, packages that pip brings only if asked for, and a Python that is not too old."""
    stranger = Stranger(tmp_path, manygpus)
    assert "login node" in one_error(stranger.run("init"))
    assert not (stranger.project / "slurm").exists()
    for command in ("submit", "sweep"):
        assert "train.py" in one_error(stranger.run(command, "--gpus", 2))
    assert "nowhere.py" in one_error(stranger.run("submit", "nowhere.py"))
    assert "--lr" in one_error(stranger.run("submit", "--lr", 1, "train.py"))
    for command in ("compare", "how-many"):
        assert "-m pip install scipy tabulate jinja2 matplotlib" in one_error(stranger.run(command))
    assert "no job of this project" in one_error(stranger.run("why", 3))
    assert [path.name for path in stranger.project.iterdir()] == ["train.py"]
    # As Python 3.6 says it, which RHEL 8 has, and as the shell does where there is no environment.
    old = tmp_path / "python3.6"
    old.write_text("#!/bin/sh\necho 'SyntaxError: future feature annotations is not defined' >&2\nexit 1\n")
    old.chmod(0o755)
    assert f"{old} for train is older" in stranger.run("doctor", "--python", old, "train.py").stdout
    config = Path(stranger.environment["XDG_CONFIG_HOME"]) / "manygpus"
    config.mkdir(parents=True)
    (config / "site.sh").write_text("activate_environment() { PATH=/nowhere; }\n")
    assert "there is no python for train" in stranger.run("doctor", "train.py").stdout
