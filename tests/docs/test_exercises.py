"""The exercises: the replies to the untouched starter, to typical wrong answers and to the solution."""

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import make_project, wait_until
from conftest import ENVIRONMENT, REPOSITORY, ran, succeeded
from forking import Forking

from manygpus.workshop import exercises
from manygpus.workshop.exercises import Course, Exercise, relative
from manygpus.workshop.sections import anchor_of
from manygpus.workshop.work import Workspace, Wrong

pytestmark = pytest.mark.usefixtures("mnist_dir")

FOLDERS = sorted(path.parent for path in REPOSITORY.glob("0*/exercises/*/check.py"))
STAGE_FOLDERS = sorted({folder.parents[1].name for folder in FOLDERS})
CHECKS = {folder: runpy.run_path(str(folder / "check.py")) for folder in FOLDERS}


def name_of(folder: Path) -> str:
    return f"{folder.parents[1].name[:2]}-{folder.name.partition('_')[2]}"


each = pytest.mark.parametrize("folder", FOLDERS, ids=name_of)


class Learner:
    """Somebody at work on one exercise, in a copy of its folder."""

    def __init__(self, folder: Path, tmp_path: Path, forking: Forking) -> None:
        self.original, self._forking = folder, forking
        self.exercises = tmp_path / folder.parents[1].name / "exercises"
        left_out = shutil.ignore_patterns("mine", "mine-*", "__pycache__")
        self.folder = shutil.copytree(folder, self.exercises / folder.name, ignore=left_out)
        shutil.copy(folder.parent / "check.py", self.exercises)
        for path in [*REPOSITORY.iterdir(), *folder.parents[1].iterdir()]:
            link = tmp_path / path.relative_to(REPOSITORY)
            if not link.exists():
                link.symlink_to(path)
        self.mine, self.name = self.folder / "mine", folder.name.partition("_")[2]

    def do(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """`python exercises/check.py <arguments>`."""
        return self.run(self.exercises / "check.py", *arguments, **environment)

    def run(self, *command: object, **environment: str) -> subprocess.CompletedProcess:
        return self._forking.run(*command, env=ENVIRONMENT | environment)

    def check(self) -> tuple[int, str]:
        """Exit code, and what the check says, in one line."""
        done = self.do("check", self.name)
        assert not done.stderr, done.stderr
        return done.returncode, " ".join(done.stdout.split())

    def solve(self) -> None:
        """Lay out the solution."""
        self.do()
        if "RECORDED" in CHECKS[self.original]:
            assert self.do("recorded", self.name).returncode == 0
        for name, text in Exercise(self.folder).solution.items():
            (self.mine / name).write_text(text)


@pytest.fixture
def learner(tmp_path: Path, forking: Forking) -> Callable[[Path], Learner]:
    return lambda folder: Learner(folder, tmp_path, forking)


@each
def test_the_untouched_starter_is_told_what_to_do(folder: Path, learner: Callable[[Path], Learner]) -> None:
    code, said = learner(folder).check()
    assert code == 1
    assert said.startswith(f"{name_of(folder)[3:]}: not yet. ")
    assert CHECKS[folder]["STARTS_WITH"] in said


@each
def test_the_solution_passes(folder: Path, learner: Callable[[Path], Learner]) -> None:
    mine = learner(folder)
    mine.solve()
    code, said = mine.check()
    assert (code, said.split(". ")[0]) == (0, f"{mine.name}: done"), said
    assert mine.do().stdout.splitlines()[0].startswith(f"[x] {Exercise(folder).number:2}  {mine.name} ")


# Checks one wrong answer after the other, each in a copy of the solution, and prints what it is told.
ANSWER_WRONGLY = """
import json, shutil, sys
from pathlib import Path
from manygpus.workshop import ranks
from manygpus.workshop.exercises import Exercise

ranks.TIMEOUT = 10  # seconds; some of them hang
folder, answers = Path(sys.argv[1]), json.loads(sys.argv[2])
solved = shutil.copytree(folder / "mine", folder / "solved")
for pattern, right, wrong in answers:
    shutil.copytree(solved, folder / "mine", dirs_exist_ok=True)
    for path in folder.glob(f"mine/{pattern}"):
        text = path.read_text()
        path.write_text(text.replace(right, wrong))
    try:
        said = Exercise(folder).check()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(" ".join(said.split()))
"""


@pytest.mark.full
@each
def test_typical_wrong_answers_get_their_hints(folder: Path, learner: Callable[[Path], Learner]) -> None:
    mine = learner(folder)
    mine.solve()
    script = mine.exercises / "answer_wrongly.py"
    script.write_text(ANSWER_WRONGLY)
    when_done = CHECKS[folder].get("TOLD_WHEN_DONE", [])
    *answers, hints = zip(*CHECKS[folder]["WRONG"], *when_done, strict=True)
    for pattern, right in zip(*answers[:2], strict=True):
        assert any(right in path.read_text() for path in mine.mine.glob(pattern)), f"{right!r}: {pattern}"
    done = mine.run(script, mine.folder, json.dumps(list(zip(*answers, strict=True))))
    printed = done.stdout.splitlines()
    assert [hint for hint, said in zip(hints, printed, strict=True) if hint not in said] == [], printed
    is_wrong = [said.startswith("Wrong: ") for said in printed]
    assert is_wrong == [True] * (len(printed) - len(when_done)) + [False] * len(when_done), printed
    assert CHECKS[folder]["STARTS_WITH"] not in hints


def test_time_limit_begins_with_the_solution_of_convert() -> None:
    """But for what the files say of themselves: each exercise can be copied alone."""
    folder = REPOSITORY / "03_multigpu_ddp" / "exercises"
    convert = Exercise(folder / "06_convert")
    begins = {"digits.py": (convert.folder / "starter" / "digits.py").read_text()} | convert.solution
    for name in ("train.py", "digits.py"):
        bodies = [
            ast.unparse(ast.parse(text).body[1:])
            for text in (begins[name], (folder / "07_time_limit" / "starter" / name).read_text())
        ]
        assert bodies[0] == bodies[1], name


@pytest.mark.full
def test_convert_accepts_batchnorm_over_all_ranks(learner: Callable[[Path], Learner]) -> None:
    mine = learner(REPOSITORY / "03_multigpu_ddp" / "exercises" / "06_convert")
    mine.solve()
    script = mine.mine / "train.py"
    wrapped = "    ddp = DistributedDataParallel(model)\n"
    broadcast = "            dist.broadcast(buffer, src=0)\n"
    text = script.read_text()
    assert wrapped in text and broadcast in text
    converted = f"    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)\n{wrapped}"
    script.write_text(text.replace(broadcast, "            pass\n").replace(wrapped, converted))
    code, said = mine.check()
    assert code == 0 and "images of all ranks together" in said, said


@pytest.mark.full
def test_convert_accepts_processes_that_meet_where_they_choose_a_device(
    learner: Callable[[Path], Learner],
) -> None:
    mine = learner(REPOSITORY / "03_multigpu_ddp" / "exercises" / "06_convert")
    mine.solve()
    script = mine.mine / "train.py"
    text = script.read_text()
    joined = text[text.index('    if device.type == "cuda":\n') : text.index("    rank, size = dist")]
    text = text.replace(joined, "")
    start, end = text.index("    if not torch.cuda.is_available():\n"), text.index("    return device\n")
    body = (
        '    device = torch.device("cpu")\n'
        "    if torch.cuda.is_available():\n"
        '        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))\n'
        "        torch.cuda.set_device(device)\n"
    )
    script.write_text(f"{text[:start]}{body}{joined}{text[end:]}")
    code, said = mine.check()
    assert code == 0, said


@each
def test_an_exercise_has_all_its_parts(folder: Path) -> None:
    exercise = Exercise(folder)
    assert len(exercise.hints) == 3 and all(exercise.hints)
    assert len(CHECKS[folder]["WRONG"]) >= 2
    shipped = {path.name for path in folder.glob("starter/*")}
    assert {*exercise.solution} <= shipped | {"answers.txt"}


def test_an_exercise_has_one_number_everywhere() -> None:
    """Its folder, its page and its place: those of the core path first, and none twice."""
    course = Course(REPOSITORY)
    assert [exercise.number for exercise in course.exercises] == list(range(1, len(FOLDERS) + 1))
    assert course.exercises[: len(course.core)] == course.core
    for exercise in course.core:
        said = f"**Core, {exercise.number} of {len(course.core)}.** "
        assert f"\n{said}" in exercise.readme.read_text(), exercise.name


def test_the_core_path_reads_the_sections_that_its_exercises_need() -> None:
    """Each is there; a page that says what to read of it names the same, and lesson 01 begins with them."""
    needed: dict[Path, list[str]] = {}
    for exercise in Course(REPOSITORY).core:
        assert exercise.minutes_to_read > 0, exercise.name
        for section in exercise.sections:
            needed.setdefault(section.page, []).append(section.anchor)
    said = {}
    for page in needed.keys() & set(REPOSITORY.glob("0*/README.md")):
        (paragraph,) = re.findall(
            r"\[core path\]\(\S+\)(?:\*\*)?, read(.*?)(?:\n- |\n\*\*On)", page.read_text(), re.DOTALL
        )
        said[page] = list(dict.fromkeys(re.findall(r"\]\(#(\S+)\)", paragraph)))
    for page, anchors in said.items():
        assert sorted(anchors) == sorted(needed[page]), page
    first = REPOSITORY / "01_singlegpu" / "README.md"
    headings = [anchor_of(title) for title in re.findall(r"^## (.+)$", first.read_text(), re.MULTILINE)]
    assert headings[: len(needed[first])] == needed[first]
    assert said[first][0] == needed[first][-1]  # read to the end of that one


def test_the_time_of_the_core_path_is_the_same_everywhere() -> None:
    hours = f"{round(Course(REPOSITORY).minutes / 30) / 2:g} hours"
    assert f"exercises take about {hours}" in (REPOSITORY / "README.md").read_text(), hours
    assert f"alone needs about {hours}" in (REPOSITORY / "INSTRUCTORS.md").read_text(), hours


CLOCK = REPOSITORY / "01_singlegpu" / "exercises" / "01_clock"


@pytest.fixture
def clock(learner: Callable[[Path], Learner]) -> Learner:
    return learner(CLOCK)


def test_the_list_shows_what_is_done(clock: Learner) -> None:
    listed, _, before, *_ = clock.do().stdout.splitlines()
    assert listed == "[ ]  1  clock   10 min  core   What does the clock measure?"
    clock.solve()
    clock.check()
    listed, _, after, *_ = clock.do().stdout.splitlines()
    assert listed.startswith("[x]  1 ")
    # The exercises of the other stages, which may be done, count as well.
    assert after.count("#") == before.count("#") + 1


@pytest.mark.parametrize(
    ("done", "following"),
    [
        ([], "clock"),
        (["clock", "jobscript"], "waiting_loader"),
        (["clock", "convert"], "time_limit"),  # beyond those that were left out
        (["your_job"], "clock"),  # at the end come those that were left out
    ],
)
def test_nobody_is_sent_back(done: list[str], following: str, tmp_path: Path, forking: Forking) -> None:
    """The next exercise is named with what to read for it, in whichever stage one asks."""
    left_out = shutil.ignore_patterns("mine*", "progress.json", "__pycache__")
    for page in {section.page for exercise in Course(REPOSITORY).core for section in exercise.sections}:
        copy = tmp_path / page.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, copy)
    for stage in STAGE_FOLDERS:
        folder = tmp_path / stage / "exercises"
        shutil.copytree(REPOSITORY / stage / "exercises", folder, ignore=left_out, dirs_exist_ok=True)
        (folder / "progress.json").write_text(json.dumps({"done": done, "hints": {}}))
    needs = next(exercise for exercise in Course(tmp_path).core if exercise.name == following)
    for stage in STAGE_FOLDERS:
        printed = forking.run(tmp_path / stage / "exercises" / "check.py", env=ENVIRONMENT).stdout
        said = printed[printed.index("Next: ") :].splitlines()
        assert said[0].startswith(f"Next: {needs.number} {following}, {needs.minutes} minutes. "), said
        assert [line.rpartition(": ")[2] for line in said[1:-1]] == [s.title for s in needs.sections]
        assert str(relative(needs.readme)) in said[-1]


def test_an_exercise_of_another_stage(clock: Learner) -> None:
    done = clock.do("check", "hang")
    assert done.returncode == 1
    assert "exercise hang is in another folder: cd " in done.stderr


def test_hints_come_one_by_one_and_the_third_tells_of_the_solution(clock: Learner) -> None:
    said = [clock.do("hint", "clock").stdout for _ in range(4)]
    assert [text.splitlines()[0] for text in said] == [
        f"clock, hint {number} of 3:" for number in (1, 2, 3, 3)
    ]
    assert ["solution clock" in text for text in said] == [False, False, True, True]


def test_an_answer_given_twice(clock: Learner) -> None:
    clock.solve()
    (clock.mine / "answers.txt").write_text("a = 1\na = 2\n")
    assert "[line 2]" in clock.check()[1]


def test_a_reset_keeps_what_was_written(clock: Learner) -> None:
    for number, text in enumerate(["first", "second"], start=1):
        clock.do()
        (clock.mine / "clock.py").write_text(text)
        assert f"kept in {relative(clock.folder / f'mine-{number}')}." in clock.do("reset", "1").stdout
        assert (clock.folder / f"mine-{number}" / "clock.py").read_text() == text
        assert (clock.mine / "clock.py").read_text() == (CLOCK / "starter" / "clock.py").read_text()


def test_the_solution_is_shown_as_a_difference(clock: Learner) -> None:
    shown = clock.do("solution", "clock").stdout.splitlines()
    assert [line for line in shown if "prediction" in line] == ["-prediction = ?", "+prediction = high"]
    assert sum(line.startswith("+++ solution/") for line in shown) == 2


def test_numbers_as_they_are_written(tmp_path: Path) -> None:
    def number(text: str) -> float:
        (tmp_path / "answers.txt").write_text(f"answer = {text}  # what it was")
        return Workspace(tmp_path).answers().number("answer")

    written = {"1,327": 1327, "1,234,567.5 images/s": 1234567.5, "98.5 %": 98.5, "98.5%": 98.5, "1.8x": 1.8}
    assert {text: number(text) for text in written} == written
    assert number("12 000 images") == 12000
    for text in ("1,5", "0,125", "many", "nan", "1,2345"):
        with pytest.raises(Wrong, match="is not a number"):
            number(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "watch"], "there is no exercise 'watch' here: the exercises are clock."),
        (["check"], "the following arguments are required: name"),
        (["chekc", "clock"], "invalid choice"),
        (["recorded", "clock"], "there are no recorded runs for clock"),
    ],
)
def test_a_mistake_on_the_command_line_gets_a_sentence(
    arguments: list[str], words: str, clock: Learner
) -> None:
    done = clock.do(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("answers.txt", "high", "needs lines `name = value`"),
        ("answers.txt", "prediction = high\nprediction = low", "each name once"),
        ("answers.txt", "", "`prediction = ...` is missing"),
        ("answers.txt", "prediction = perhaps", "one of high, low, not 'perhaps'"),
        ("clock.py", "def images_per_second(:", "SyntaxError"),
        ("clock.py", "import device\n\n1 / 0", "clock.py stops in line 3 with ZeroDivisionError: division"),
        ("clock.py", "raise ValueError('mine')", "in line 1 with ValueError: mine."),
        ("clock.py", "import os\nos._exit(0)", "ended the check. Does it call `exit`"),
        ("clock.py", "", "no longer has `images_per_second`"),
        ("clock.py", "def images_per_second(device):\n    pass", "cannot use what your program returns"),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(name: str, text: str, words: str, clock: Learner) -> None:
    clock.solve()
    (clock.mine / name).write_text(text)
    code, said = clock.check()
    assert code == 1
    assert words in said, said


def test_a_program_that_never_ends_is_killed_with_its_ranks(
    clock: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exercises, "CHECK_SECONDS", 10)
    clock.do()
    (clock.mine / "answers.txt").write_text("prediction = high")
    (clock.mine / "clock.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "from manygpus.workshop.ranks import in_ranks\n"
        "def wait(rank, size):\n"
        "    Path(__file__).with_name(f'rank{rank}').write_text(str(os.getpid()))\n"
        "    while True:\n"
        "        try: time.sleep(1)\n"
        "        except BaseException: pass\n"
        "in_ranks(wait)\n"
    )
    with pytest.raises(Wrong, match="takes longer than"):
        Exercise(clock.folder).check()
    for rank in (0, 1):
        process = (clock.mine / f"rank{rank}").read_text()
        wait_until(lambda process=process: not Path("/proc", process).exists())


def test_a_thread_that_never_ends_holds_nothing_up(clock: Learner) -> None:
    clock.solve()
    with (clock.mine / "clock.py").open("a") as program:
        program.write("\nimport threading, time\nthreading.Thread(target=time.sleep, args=(999,)).start()\n")
    assert clock.check()[0] == 0


def test_a_file_that_is_gone(clock: Learner) -> None:
    clock.solve()
    (clock.mine / "clock.py").unlink()
    assert "mine/clock.py cannot be read" in clock.check()[1]


def test_a_rank_that_fails_is_told_of(forking: Forking, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from manygpus.workshop import ranks\n"
        "def add(rank, size):\n"
        "    total = torch.tensor(rank); dist.all_reduce(total); return total.item()\n"
        "def die(rank, size):\n"
        "    if rank == 1: import os; os._exit(3)\n"
        "def fail(rank, size):\n"
        "    if rank == 1: raise ValueError('no')\n"
        "print(ranks.in_ranks(add, 3))\n"
        "for wrong in (die, fail):\n"
        "    try: ranks.in_ranks(wrong)\n"
        "    except ranks.Wrong as error: print(error)\n"
    )
    done = forking.run(tmp_path / "ranks.py", env=ENVIRONMENT)
    added, *printed = done.stdout.splitlines()
    assert added == "[3, 3, 3]", done.stderr
    assert printed == ["Rank 1 ended without a message.", "Rank 1 stops with ValueError in line 8: no"]


@pytest.mark.full
def test_what_py_spy_shows_of_the_ranks_that_hang(tmp_path: Path) -> None:
    """As in exercise `hang`, of the starter as it is."""
    folder = REPOSITORY / "03_multigpu_ddp" / "exercises" / "08_hang"
    script = shutil.copy(folder / "starter" / "train.py", tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", script]
    spy = [Path(sys.executable).parent / "py-spy", "dump", "--locals", "--subprocesses", "--pid"]
    stands = re.compile(r"\(train\.py:(\d+)\).*?^ +rank: (\d)", re.MULTILINE | re.DOTALL)
    expected, places, said = [("32", "2"), ("46", "0"), ("46", "1")], [], ""
    with subprocess.Popen(torchrun, env=ENVIRONMENT) as running:
        try:
            for _ in range(60):
                time.sleep(1)
                done = subprocess.run([*spy, str(running.pid)], capture_output=True, text=True)
                if "Permission Denied" in done.stderr:
                    pytest.skip("the system lets no process look into another one")
                said = done.stdout
                places = sorted(
                    rank.groups() for part in said.split("\nProcess ") if (rank := stands.search(part))
                )
                if places == expected:
                    break
        finally:
            running.terminate()
    assert places == expected, said


PROFILE = REPOSITORY / "03_multigpu_ddp" / "exercises" / "20_profile"


@pytest.mark.parametrize(
    ("missing", "words"),
    [("small.rank-0.json", "Start the run `small`"), ("late.rank-1.json", "none of rank 1")],
)
def test_a_trace_that_is_missing(missing: str, words: str, learner: Callable[[Path], Learner]) -> None:
    mine = learner(PROFILE)
    mine.solve()
    (mine.mine / "runs" / missing).unlink()
    assert words in mine.check()[1]


@pytest.mark.full
def test_what_the_profiler_writes_of_two_ranks(learner: Callable[[Path], Learner]) -> None:
    """The events that exercise `profile` reads have the same names in this PyTorch."""
    mine = learner(PROFILE)
    mine.solve()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for recorded in (mine.mine / "runs").glob("small.*"):
        recorded.unlink()
    succeeded(ran(*torchrun, mine.mine / "train.py", "small", "--bucket-mb=1"))
    for rank in CHECKS[PROFILE]["read_run"](Workspace(mine.mine), "small"):
        assert [step.number for step in rank] == [3, 4]
        for step in rank:
            assert len(step.all_reduces) == len(step.handed_over) > 1
            assert min(bar.start for bar in step.all_reduces) > step.phases["backward"].start


def test_all_open_answers_are_named(learner: Callable[[Path], Learner]) -> None:
    said = learner(CLOCK.parent / "03_waiting_loader").check()[1]
    assert "`prediction`, `waited`, " in said and "`workers` are still open" in said


def test_recorded_runs_take_the_place_of_own_ones(learner: Callable[[Path], Learner]) -> None:
    mine = learner(CLOCK.parent / "03_waiting_loader")
    (mine.mine / "runs").mkdir(parents=True)
    (mine.mine / "runs" / "own.csv").write_text("broken off")
    said = mine.do("recorded", "waiting_loader").stdout
    assert f"Your own runs are kept in {relative(mine.mine / 'own-runs-1')}." in said
    assert (mine.mine / "own-runs-1" / "own.csv").read_text() == "broken off"
    assert len(list((mine.mine / "runs").glob("*.csv"))) == 2


# --- the first steps of somebody who has just cloned the project ----------------------------------------


def learn(project: Path, done: dict[str, list[str]]) -> list[str]:
    """What `make learn` prints when these exercises are done."""
    for stage in STAGE_FOLDERS:
        progress = {"done": done.get(stage, []), "hints": {}}
        (project / stage / "exercises" / "progress.json").write_text(json.dumps(progress))
    return succeeded(ran("make", "--no-print-directory", "-C", project, "learn")).stdout.splitlines()


@pytest.mark.full
def test_first_steps(tmp_path: Path) -> None:
    """And the way on from there."""
    project = make_project(tmp_path)
    (project / ".venv" / "bin" / "activate").touch()
    printed = learn(project, {})
    assert any(line.startswith("GPUs    none: ") for line in printed)
    assert f"MNIST   in {project / 'data'}" in printed
    assert sum(line.startswith("Slurm   ") for line in printed) == 1
    of_each = [(folder.parents[1].name, folder.name.partition("_")[2]) for folder in FOLDERS]
    names = {stage: [name for of, name in of_each if of == stage] for stage in STAGE_FOLDERS}
    first, third = STAGE_FOLDERS
    core = {
        folder.name.partition("_")[2] for folder in FOLDERS if "**Core" in (folder / "README.md").read_text()
    }
    assert sum(line.startswith("[ ] ") for line in printed) == len(core)
    assert f"Core path: [{'.' * len(core)}] 0 of {len(core)} exercises done." in printed
    assert printed[-4:] == [
        "To begin, type these commands:",
        "  source .venv/bin/activate",
        f"  cd {first}",
        "  python exercises/check.py",
    ]

    (project / "data").unlink()
    printed = learn(project, {first: names[first]})
    assert sum(line.startswith("[x] ") for line in printed) == len(core.intersection(names[first]))
    assert "MNIST   missing or damaged" in printed
    assert printed[-4] == "  make data" and printed[-2] == f"  cd {third}"
    assert not (project / "data").exists()
    extra_left = {stage: [name for name in of if name in core] for stage, of in names.items()}
    assert learn(project, extra_left)[-1].startswith("The core path is done.")
