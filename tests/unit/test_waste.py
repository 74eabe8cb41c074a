"""What a job wastes: recorded and written traces of every kind, and what may be odd about samples."""

import csv
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import traces
from traces import (
    FROM_LOADERS,
    FULL,
    H100,
    STARVED,
    TRACES,
    UNUSED,
    Gpu,
    SyntheticJob,
    Throttling,
    folder_of,
)

from trainkit.errors import UserError
from trainkit.monitor import sampled_job, waste
from trainkit.record import records, samples

# What the first line has, the kind and the grade: of all traces, and of jobs on one H100.
FIRST_LINES = {
    "cpu_healthy": ("no waste found", None, None),
    "cpu_waiting_for_loader": ("of the training time of rank 0", "waiting_for_loader", "waste"),
    "cpu_shared_cores": ("2 ranks share 1 core: ask for more --cpus-per-task", "shared_cores", "waste"),
    "cpu_stalled_rank": ("SIGSTOP held rank 1", "stalled_rank", "waste"),
    "cpu_network_bound": ("the exchange of gradients takes", "network_bound", "waste"),
    "gpu_no_rank": ("no rank uses GPU 2 on n1: ask for 2 GPUs", "no_rank", "waste"),
    "gpu_idle": ("no work reaches GPU 1 on n1, while others work (63 of 400 W", "idle_gpu", "waste"),
    "gpu_memory_full": ("98 % of the memory on GPUs 0, 1 on n1 was in use", "memory_full", "danger"),
    "gpu_throttled_by_heat": ("heat (91 C) slows down GPU 1 on n1", "throttled", "waste"),
    "gpu_throttled_by_cap": ("a cap (power limit 150 W) slows down GPUs 0, 1 on n1", "throttled", "waste"),
    "gpu_network_bound": ("the exchange of gradients takes 62 %", "network_bound", "waste"),
    "gpu_slow_rank": ("rank 2 on n1 takes 2.8 times as long as the others", "stalled_rank", "waste"),
}
RECORDED = {
    "batch_1024_bf16": (
        "could be faster: for 32 % of the time no kernel runs on GPU 0 on vm, at 35 % of its power above "
        "idle (297 of 700 W, utilisation 68 %, 2.99 ms a step): a larger batch per GPU",
        "launch_bound",
        "could be faster",
    ),
    "launch_bound_64_tf32": (
        "gaps between kernels leave GPU 0 on vm at 8 % of its power above idle (143 of 700 W, utilisation 24",
        "launch_bound",
        "waste",
    ),
    "input_bound": ("waiting for batches takes 93 %", "waiting_for_loader", "waste"),
    "captured_64_tf32": (  # as busy as can be, with little to do for each kernel
        "short kernels leave GPU 0 on vm at 19 % of its power above idle (227 of 700 W, utilisation 98 %",
        "launch_bound",
        "waste",
    ),
    "captured_1024_bf16": ("no waste found", None, None),
    "healthy_4096_bf16_short": ("no waste found", None, None),
}
Row = dict[str, str]


def kinds(folder: Path) -> list[str]:
    return [finding.kind for finding in waste.judge(folder).findings]


def first_line(folder: Path) -> str:
    return waste.judge(folder).lines("job 12")[0]


def change(folder: Path, how: Callable[[Row], Row | None]) -> None:
    """Every sample as `how` returns it, or without those for which that is None."""
    for path in folder.glob("*.csv"):
        with path.open(newline="") as file:
            rows = [row for row in map(how, csv.DictReader(file)) if row]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, samples.COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    """The folder of a job of these GPUs; `record=False`: of a training that left none."""

    def make(gpus: list[Gpu], record: bool = True, **how: object) -> Path:
        folder = tmp_path / "monitor"
        traces.write(folder, SyntheticJob(gpus, **how))
        if not record:
            shutil.rmtree(folder / "training")
        return folder

    return make


@pytest.mark.parametrize("name", FIRST_LINES)
def test_each_trace_has_its_verdict(name: str) -> None:
    words, *kind_and_grade = FIRST_LINES[name]
    verdict = waste.judge(folder_of(name))
    lines = verdict.lines("job 12")
    assert words in lines[0] and lines[-1].startswith("job 12 was watched for ")
    found = [[finding.kind, finding.grade] for finding in verdict.findings]
    if name.startswith("gpu"):  # nothing beside what is written into them
        assert found == [kind_and_grade]
        assert verdict.energy_kwh > 0
    else:
        assert found[:1] == [kind_and_grade] * ("no waste" not in words)
        assert math.isnan(verdict.energy_kwh) and "kWh" not in lines[-1]


@pytest.mark.parametrize("name", RECORDED)
def test_the_verdict_on_a_real_gpu(name: str) -> None:
    words, *kind_and_grade = RECORDED[name]
    verdict = waste.judge(H100 / name)
    assert verdict.lines("job 12")[0].startswith(words)
    found = [[finding.kind, finding.grade] for finding in verdict.findings]
    assert found == [kind_and_grade] * ("no waste" not in words)


def test_every_trace_is_judged_and_told_of() -> None:
    there = {folder.name for folder in [*traces.recorded(), *TRACES.glob("gpu_*")]}
    assert FIRST_LINES.keys() == traces.SYNTHETIC.keys() | there
    assert {*traces.COMMITTED} == traces.SYNTHETIC.keys() & there
    assert all(f"`{name}`" in (TRACES / "README.md").read_text() for name in there)


def test_a_written_trace_is_the_one_that_the_tool_writes(tmp_path: Path) -> None:
    for name in traces.COMMITTED:
        traces.write(tmp_path / name, traces.SYNTHETIC[name])
        for path in (tmp_path / name).rglob("*.csv"):
            assert path.read_text() == (TRACES / path.relative_to(tmp_path)).read_text()


def test_utilisation_alone_decides_nothing(made: Callable[..., Path]) -> None:
    """Half of the time without a kernel, at a power that says it is busy; and then the other way round."""
    assert kinds(made([Gpu(utilisation=50)] * 2)) == []
    assert kinds(made([Gpu(utilisation=50, power_w=100)] * 2)) == ["launch_bound"]
    assert kinds(made([Gpu(utilisation=100, power_w=100)] * 2)) == ["launch_bound"]
    folder = made([Gpu(utilisation=3, power_w=60)])
    change(folder, lambda row: row | {"power_w": ""})
    assert kinds(folder) == []
    assert any("not seen: the power of the GPUs" in line for line in waste.judge(folder).lines(""))
    folder = made([Gpu(utilisation=100, power_w=100)])
    change(folder, lambda row: row | {"utilisation": ""})
    assert " W, " in first_line(folder) and "utilisation" not in first_line(folder)


SOME = Gpu(power_w=175, utilisation=70)  # a third of its power, and of its time without a kernel


def test_what_could_be_faster_is_told_apart_from_waste(made: Callable[..., Path]) -> None:
    (finding,) = waste.judge(made([SOME] * 2)).findings
    assert (finding.kind, finding.grade) == ("launch_bound", "could be faster")
    assert finding.number == pytest.approx(30, abs=1) and finding.share == pytest.approx(0.3, abs=0.01)
    waste_first = waste.judge(made([replace(SOME, utilisation=30), UNUSED, UNUSED], ranks=1)).findings
    assert [finding.grade for finding in waste_first] == ["waste", "could be faster"]
    assert "loader workers if there are none" in first_line(made([SOME], record=False))
    remedies = {
        "ddp": "or a captured step (",
        "ddp-captured": "(--batch-size).",
        "dp": "or DDP (03_multigpu_ddp).",
    }
    for stage, remedy in remedies.items():  # DataParallel's step cannot be captured
        assert remedy in first_line(made([SOME] * 2, facts={"stage": stage}))


def test_what_is_as_fast_as_it_can_be(made: Callable[..., Path]) -> None:
    """Kernels all the time, or power; gaps that are for want of batches, or of an evaluation in between."""
    assert kinds(made([replace(SOME, utilisation=97)] * 2)) == []
    assert kinds(made([replace(SOME, power_w=290)] * 2)) == []
    assert kinds(made([replace(SOME, data_share=0.15)] * 2, facts=FROM_LOADERS)) == []
    assert kinds(made([replace(SOME, data_share=math.nan)] * 2, facts=FROM_LOADERS)) == []  # nobody knows
    assert kinds(made([SOME] * 2, epochs=8, train_seconds=2)) == []


def test_the_worst_comes_first(made: Callable[..., Path]) -> None:
    crowded = replace(STARVED, waiting_share=0.4)
    hot = replace(crowded, memory_share=0.99, throttling=Throttling("heat", 0.2), clock_mhz=1_300)
    folder = made([hot, crowded, UNUSED], ranks=2, host_memory_share=0.93, facts=FROM_LOADERS)
    verdict = waste.judge(folder)
    shares = [finding.share for finding in verdict.findings]
    assert shares == sorted(shares, reverse=True)
    every = ["waiting_for_loader", "no_rank", "shared_cores", "throttled", "memory_full", "host_memory"]
    assert [finding.kind for finding in verdict.findings] == every
    lines = verdict.lines("job 12")
    assert lines[:-1] == [finding.sentence for finding in verdict.findings]
    assert lines[-2].startswith("93 % of the job's memory on n1 was in use")


def test_the_next_request_is_the_peak_and_a_margin(made: Callable[..., Path]) -> None:
    """Only what saves something, of a job script that asked for it; no fewer cores where batches are late."""

    def told(gpus: list[Gpu], asked: str, ended: str = "0", checkpoint: str = "", **how: object) -> list[str]:
        folder = made(gpus, host_memory_share=0.13, **how)
        change(folder, lambda row: row | ({"checkpoint_mb": checkpoint} if row["what"] == "node" else {}))
        (folder / "asked").write_text(asked)
        (folder / "ended").write_text(ended)
        return waste.judge(folder).lines("job 12")[1:-1]

    loading = [Gpu(loaders=2, loader_cores=1.98)] * 2
    assert told(loading, "8 2 61440") == [
        "next time --mem=10G --cpus-per-task=4 would be enough: the job used 7.7 of --mem=60G, 3.0 of "
        "--cpus-per-task=8 at the peak."
    ]
    memory = ["next time --mem=10G would be enough: the job used 7.7 of --mem=60G at the peak."]
    assert told(loading, "8 1 61440") == memory  # torchrun: one task with all ranks of its node
    assert told(loading, "4 2 61440") == told([STARVED] * 2, "8 2 61440", facts=FROM_LOADERS) == memory
    cores = [
        "next time --cpus-per-task=4 would be enough: the job used 3.0 of --cpus-per-task=8 at the peak."
    ]
    assert told(loading, "8 2 0") == cores  # no --mem was given
    assert told(loading, "") == []
    resumed = "next time --mem=14G would be enough: the job used 7.7 of --mem=60G at the peak, and a resume"
    assert told(loading, "4 2 61440", checkpoint="2000") == [f"{resumed} may take 3.7 more."]
    shared = made(loading)
    change(shared, lambda row: row | ({"shared_files_mb": "3000"} if row["what"] == "node" else {}))
    (shared / "asked").write_text("4 2 61440")
    (shared / "ended").write_text("0")
    assert waste.judge(shared).enough.startswith("next time --mem=13G would be enough: the job used 10.5 of")
    for ended in ("137", "1", ""):  # killed for want of memory, perhaps; the last one runs
        assert told(loading, "8 2 61440", ended) == []
    short = made(loading, epochs=1, train_seconds=1, record=False)
    (short / "asked").write_text("8 2 61440")
    (short / "ended").write_text("0")
    assert waste.judge(short).enough == ""


def test_no_lines_beside_the_worst(made: Callable[..., Path]) -> None:
    """GPUs at low power, and a rank that waits: what follows from the loader is not repeated."""
    assert kinds(made([STARVED, FULL], facts=FROM_LOADERS)) == ["waiting_for_loader"]
    assert kinds(made([STARVED] * 2, facts=FROM_LOADERS)) == ["waiting_for_loader"]
    assert kinds(made([replace(STARVED, data_share=0.1)] * 2, facts=FROM_LOADERS)) == ["launch_bound"]
    own_work = [
        replace(STARVED, loaders=0, loader_cores=0, data_share=share) for share in (0.3, 0.5)
    ]  # resident
    assert kinds(made(own_work[:1])) == ["launch_bound"]
    assert "or prepare less for each batch" in first_line(made(own_work[1:]))


@pytest.mark.parametrize(
    ("loaders", "cores", "words"),
    [
        (0, 0, "(no loader workers): take some (--loader workers --num-workers 4"),
        (2, 1.98, "(2 loader workers each, at 99 % of a core): take more (--num-workers)"),
        (2, 3.6, "(2 loader workers each, at 180 % of a core): all cores are in use"),
        (2, 0.5, "(2 loader workers each, at 25 % of a core): the workers also wait"),
    ],
)
def test_the_remedy_of_a_waiting_loader(
    made: Callable[..., Path], loaders: int, cores: float, words: str
) -> None:
    gpu = replace(STARVED, loaders=loaders, loader_cores=cores)
    facts = FROM_LOADERS | {"workers_per_loader": loaders}
    assert words in first_line(made([gpu] * 2, facts=facts))


def test_a_training_without_a_record(made: Callable[..., Path]) -> None:
    """What shows from outside."""
    assert kinds(made([FULL] * 2, record=False)) == []
    assert kinds(made([STARVED] * 2, record=False)) == ["waiting_for_loader"]
    short = Gpu(power_w=110, utilisation=95)
    assert kinds(made([short] * 2, record=False)) == ["launch_bound"]


def test_a_clock_that_neither_heat_nor_a_cap_holds_down(made: Callable[..., Path]) -> None:
    first = first_line(made([Gpu(power_w=148, clock_mhz=690, throttling=Throttling("other", 1))] * 2))
    assert first.startswith("something other than heat or a power cap") and "to 690 of 1,400 MHz" in first
    assert "a cap (" in first_line(made([Gpu(clock_mhz=690, throttling=Throttling("power+other", 1))]))
    unknown = first_line(made([Gpu(clock_mhz=690, throttling=Throttling("heat", 1), celsius=math.nan)]))
    assert unknown.startswith("heat slows down GPU 0 on n1")
    # At its limit a GPU has a lower clock, and full power.
    assert kinds(made([Gpu(power_w=399, clock_mhz=1_050, throttling=Throttling("power", 1))] * 2)) == []


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"name": "T"}, "SIGSTOP held rank 1 on n1 for 2"),
        ({"name": "D", "cores": "0"}, "a file system held rank 1 on n1 for 2"),
        ({"name": "S", "cores": "0.01"}, "rank 1 on n1 did nothing for 2"),
        ({"name": "S", "cores": "0"}, "ranks 0, 1 on n1 did nothing for 2"),
    ],
)
def test_a_rank_that_does_nothing(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, state: Row, words: str
) -> None:
    """While the GPU of the other one is full of kernels that wait for it; or no rank does anything."""
    monkeypatch.setattr(waste, "STALL", 15)
    folder = made([Gpu(power_w=110, utilisation=100), FULL], record=False)

    def stall(row: Row) -> Row:
        if float(row["time"]) < traces.BEGAN_AT_SECONDS + 25 or row["number"] != "1" and "0, 1" not in words:
            return row
        return row | ({"power_w": "70", "utilisation": "0"} if row["what"] == samples.GPU else state)

    change(folder, stall)
    assert words in first_line(folder)


def test_processes_that_the_script_starts_itself(made: Callable[..., Path]) -> None:
    """They are counted, and of the rank that waits for them nothing is said."""
    folder = made([FULL], record=False)
    starts = {"cores": "0.01", "others": "2", "other_cores": "1.9", "name": "S"}

    def of_a_cpu(row: Row) -> Row | None:
        return None if row["what"] == samples.GPU else row | starts

    change(folder, of_a_cpu)
    (folder / "asked").write_text("8 1 61440")
    (folder / "ended").write_text("0")
    verdict = waste.judge(folder)
    assert "--mem=" in verdict.enough and "--cpus-per-task" not in verdict.enough  # they may wait for cores
    assert verdict.findings == [] and "no waste found" not in verdict.lines("job 12")
    assert verdict.lines("job 12")[0].startswith("not judged by rank: 2 processes that the script started")
    assert verdict.devices == "2 CPU workers" and "one task on each node" not in verdict.unknown
    change(folder, lambda row: row | {"cores": "0.95"})  # as where the script is the first rank itself
    verdict = waste.judge(folder)
    assert "not judged by rank: 2 processes" in verdict.unknown and verdict.devices == "3 CPU workers"
    change(folder, lambda row: row | {"others": "0", "other_cores": "0"})
    assert waste.judge(folder).devices == "1 CPU worker"
    folder = made([FULL] * 2, record=False)
    change(folder, of_a_cpu)  # each of two tasks on a node starts as many as there are GPUs
    assert "one task on each node" in waste.judge(folder).unknown


def test_ranks_that_never_met(made: Callable[..., Path]) -> None:
    """Said where it can be told, before anything else; on two nodes another host may be that of a rank."""

    def found(
        met: str, ended: str = "0", how: Callable[[Row], Row | None] = dict, **job: object
    ) -> list[str]:
        folder = made([FULL] if "nodes" in job else [FULL] * 2, record=False, **job)
        change(folder, lambda row: how(row | ({"met": met} if row["what"] == samples.RANK else {})))
        (folder / samples.ENDED).write_text(ended)
        return kinds(folder)

    def few(row: Row) -> Row | None:
        return row if float(row["time"]) < traces.BEGAN_AT_SECONDS + 9 else None

    assert found("-") == found("host") == found("-", nodes=2) == ["never_met"]
    assert found("host", nodes=2) == found("rank") == found("") == found("-", ended="137") == []
    assert found("-", ended="143", train_seconds=150) == [
        "never_met"
    ]  # its time limit, after minutes of work
    assert found("-", how=few) == []
    folder = made([FULL, UNUSED], ranks=2, record=False)
    change(folder, lambda row: row | {"met": "-"})
    (folder / samples.ENDED).write_text("0\n")
    assert kinds(folder)[0] == "never_met" and len(kinds(folder)) > 1
    folder = made([FULL], record=False)
    change(folder, lambda row: row | {"met": "-"})
    (folder / samples.ENDED).write_text("0\n")
    assert kinds(folder) == []  # it is alone


def test_a_loader_that_starves_its_rank_is_one_finding(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its workers get a part of a core each; where they rest, too, it just does nothing."""
    monkeypatch.setattr(waste, "STALL", 10)
    for at_work, kind in (
        ("1.98", "waiting_for_loader"),
        ("0.6", "waiting_for_loader"),
        ("0", "stalled_rank"),
    ):
        folder = made([FULL], record=False)
        starved = {"name": "S", "cores": "0.01", "loaders": "2", "loader_cores": at_work}
        change(folder, lambda row, cells=starved: None if row["what"] == samples.GPU else row | cells)
        assert kinds(folder) == [kind]


def test_other_programs_on_the_cores(made: Callable[..., Path]) -> None:
    folder = made([Gpu(power_w=120, waiting_share=0.4)] * 2)
    assert "other programs also use its 8 cores" in first_line(folder)
    assert "--exclusive" not in first_line(folder)  # nobody gave it these cores
    (folder / "asked").touch()
    assert "--exclusive" in first_line(folder)
    (folder / "asked").unlink()
    assert kinds(made([Gpu(power_w=300, waiting_share=0.4)] * 2)) == []  # it hides behind the work of the GPU
    assert kinds(made([Gpu(power_w=120, waiting_share=0.7, cores=0.03)] * 2)) == [
        "launch_bound"
    ]  # hardly wants one


def test_ranks_on_cpus_that_hardly_compute(made: Callable[..., Path]) -> None:
    """For no reason that shows."""
    folder = made([FULL] * 2, record=False)
    change(folder, lambda row: None if row["what"] == samples.GPU else row | {"cores": "0.08"})
    (finding,) = waste.judge(folder).findings
    assert (finding.kind, finding.number) == ("idle_cpu", pytest.approx(92)) and "8 % of" in finding.sentence
    change(folder, lambda row: row | {"cores": "0.5"})
    assert kinds(folder) == []


def test_a_short_job_is_told_what_holds_at_any_moment(made: Callable[..., Path]) -> None:
    """What holds at any moment is reported; for the rest there is too little."""
    folder = made([STARVED] * 2, epochs=2, train_seconds=4)
    assert first_line(folder).startswith("too short to tell: ")
    folder = made([Gpu(memory_share=0.99)], epochs=1, train_seconds=2)
    assert kinds(folder) == ["memory_full"]
    first = next(folder.glob("*.csv")).read_text().splitlines()[:4]
    (folder / "n1.csv").write_text("\n".join(first) + "\n")
    first, last = waste.judge(folder).lines("job 12")
    assert first.startswith("too short to tell: 0 samples")
    assert last == f"job 12 was watched for 0 s: 1 x {traces.GPU_NAME}"


@pytest.mark.parametrize(("epochs", "train"), [(1, 15), (2, 7.5), (3, 5), (5, 3), (15, 1)])
def test_a_training_of_fifteen_seconds_has_a_verdict(
    made: Callable[..., Path], epochs: int, train: float
) -> None:
    assert first_line(made([FULL] * 2, epochs=epochs, train_seconds=train)) == "no waste found"
    assert kinds(made([Gpu(power_w=100)] * 2, epochs=epochs, train_seconds=train)) == ["launch_bound"]


def test_a_job_without_pytorch(made: Callable[..., Path]) -> None:
    folder = made([FULL], record=False)
    change(folder, lambda row: row if row["what"] == samples.NODE else None)
    assert first_line(folder).startswith("nothing to judge: no process that has loaded PyTorch")
    folder = made([FULL] * 2, record=False)
    change(folder, lambda row: None if row["what"] == samples.RANK else row | {"ranks": "-"})
    assert "no rank uses GPUs 0, 1 on n1: see why its log names the CPU" in first_line(folder)


def test_a_record_without_samples_of_its_ranks(made: Callable[..., Path]) -> None:
    folder = made([STARVED] * 2, facts=FROM_LOADERS)
    change(folder, lambda row: None if row["what"] == samples.RANK else row)
    assert kinds(folder) == ["waiting_for_loader"]


def test_nodes_are_named_in_a_verdict(made: Callable[..., Path]) -> None:
    folder = made([FULL, UNUSED], ranks=1, nodes=2)
    assert first_line(folder).startswith("no rank uses GPU 1 on n1 and GPU 1 on n2: ")
    folder = made([FULL, *[UNUSED] * 5], ranks=1, nodes=3)
    assert first_line(folder).startswith("no rank uses 15 GPUs on 3 nodes: ask for 3 GPUs")
    assert "6 GPUs" not in waste.judge(folder).lines("job 12")[-1]


def test_a_damaged_file_of_a_node_takes_nothing_from_the_others(
    made: Callable[..., Path], capsys: pytest.CaptureFixture
) -> None:
    folder = made([FULL, UNUSED], ranks=1, nodes=2)
    (folder / "n2.csv").write_text("time,what,num")
    assert first_line(folder).startswith("no rank uses GPU 1 on n1: ")
    assert f"warning: {folder / 'n2.csv'} is left out" in capsys.readouterr().err
    (folder / "n1.csv").write_text("time,what,num")
    with pytest.raises(UserError):
        waste.judge(folder)


def test_a_line_that_is_half_written_is_left_out(made: Callable[..., Path]) -> None:
    folder = made([FULL] * 2)
    before = samples.read(folder)
    with (folder / "n1.csv").open("a") as file:
        file.write(f"{traces.BEGAN_AT_SECONDS + 99},node,,,10")
    assert len(samples.read(folder)) == len(before)


def test_the_energy_is_summed_up_while_there_are_samples(made: Callable[..., Path]) -> None:
    """Not over the gap of a requeued job, nor past a counter that was reset."""
    folder = made([FULL] * 2)
    whole = waste.judge(folder)
    assert whole.energy_kwh == pytest.approx(2 * (36 * 290 + 4 * 150 + 6 * 58) / 3.6e6, rel=0.03)

    def requeue(row: Row) -> Row:
        late = float(row["time"]) >= traces.BEGAN_AT_SECONDS + 20
        row = row | {"time": str(float(row["time"]) + 500 * late)}
        return row | {"energy_j": str(float(row["energy_j"]) - 7e6 * late)} if row["energy_j"] else row

    change(folder, requeue)
    requeued = waste.judge(folder)
    assert requeued.seconds == whole.seconds - 1
    assert requeued.energy_kwh == pytest.approx(whole.energy_kwh, rel=0.03)


def test_energy_without_a_counter_is_from_the_power(made: Callable[..., Path]) -> None:
    folder = made([FULL] * 2)
    counted = waste.judge(folder)
    change(folder, lambda row: row | {"energy_j": ""})
    summed = waste.judge(folder)
    assert summed.energy_kwh == pytest.approx(counted.energy_kwh, rel=0.02)
    change(folder, lambda row: row | {"power_w": "" if row["number"] == "1" else row["power_w"]})
    unknown = waste.judge(folder)
    assert math.isnan(unknown.energy_kwh) and "kWh" not in unknown.lines("job 12")[-1]
    assert unknown.facts()["energy_kwh"] is None


def test_a_day_is_judged_by_some_of_its_moments(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made([STARVED] * 2 + [UNUSED], ranks=2, epochs=20, facts=FROM_LOADERS)
    whole = waste.judge(folder)
    monkeypatch.setattr(sampled_job, "MOST_ROWS", 300)
    some = waste.judge(folder)
    assert [finding.kind for finding in some.findings] == [finding.kind for finding in whole.findings]
    assert some.seconds == pytest.approx(whole.seconds, rel=0.03)
    assert some.energy_kwh == pytest.approx(whole.energy_kwh, rel=0.03)
    assert len(sampled_job.SampledJob(folder).rows[samples.NODE]["n1", 0]) < 70


def test_the_verdict_of_a_job_is_kept(made: Callable[..., Path]) -> None:
    folder = made([STARVED, STARVED, UNUSED], ranks=2, facts=FROM_LOADERS)
    verdict = waste.judge(folder)
    waste.keep(folder, verdict)
    kept = json.loads((folder / "verdict.json").read_text())
    assert kept["schema_version"] == 1
    assert kept["devices"] == f"3 x {traces.GPU_NAME}"
    assert kept["energy_kwh"] == verdict.energy_kwh
    assert [finding["kind"] for finding in kept["findings"]] == ["waiting_for_loader", "no_rank"]
    fields = {"kind", "where", "number", "sentence", "share", "grade"}
    assert all(finding.keys() == fields for finding in kept["findings"])
    (run,) = samples.runs(folder)
    assert json.loads(records.verdict_file(run).read_text()) == kept


def test_a_job_that_was_requeued_to_another_node(made: Callable[..., Path]) -> None:
    """It had one node at a time, and is judged where it was trained past the warm-up."""

    def moved(*gpus: Gpu, after: float = 17, **how: object) -> waste.Verdict:
        folder = made(list(gpus), **how)
        shutil.copy(folder / "n1.csv", folder.parent / "n2.csv")
        change(folder, lambda row: row if float(row["time"]) < traces.BEGAN_AT_SECONDS + after - 1 else None)
        shutil.move(folder / "n1.csv", folder.parent / "n1.csv")
        shutil.move(folder.parent / "n2.csv", folder)
        change(folder, lambda row: row if float(row["time"]) > traces.BEGAN_AT_SECONDS + after + 1 else None)
        shutil.move(folder.parent / "n1.csv", folder)
        return waste.judge(folder)

    first, last = moved(STARVED, facts=FROM_LOADERS).lines("job 12")
    assert "of rank 0 on n2 (2 loader workers, at 99 % of a core)" in first
    assert f"s: 1 x {traces.GPU_NAME}, " in last
    for after, node in ((30, "n2"), (45, "n1")):  # both are judged; the last one only evaluated
        assert moved(STARVED, after=after, facts=FROM_LOADERS).findings[0].where == f"rank 0 on {node}"
    (finding,) = moved(*[traces.SPREAD_OUT] * 2, network_mb_s=231).findings
    assert (finding.kind, finding.where) == ("network_bound", "n2") and "MB/s" not in finding.sentence


def test_a_start_that_was_stopped_after_its_warm_up_is_not_judged(made: Callable[..., Path]) -> None:
    """Each start has its own record, and this one did not wait for batches."""
    folder = made([STARVED], facts=FROM_LOADERS)
    alone = waste.judge(folder)
    (run,) = samples.runs(folder)
    warmup = records.read(run)[0]
    of_ranks = [row | {"data_seconds": 0.0} for row in records.read_ranks(run) if row["epoch"] == 1]
    stopped = run.with_name("stopped.csv")
    records.put_table(stopped, records.COLUMNS, [warmup])
    records.put_table(records.beside(stopped), records.RANK_COLUMNS, of_ranks, delimiter="\t")
    verdict = waste.judge(folder)
    assert verdict.records == [run, stopped]
    assert verdict.findings == alone.findings


def test_records_that_are_not_there_or_no_records(made: Callable[..., Path], tmp_path: Path) -> None:
    folder = made([FULL] * 2)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "a folder").mkdir()
    paths = [tmp_path / "gone.csv", tmp_path / "other.csv", tmp_path / "a folder"]
    (folder / samples.RUNS).write_text("\n".join(map(str, paths)))
    verdict = waste.judge(folder)
    assert verdict.lines("job 12")[:1] == ["no waste found"]
    assert len(verdict.notes) == 3 and "(2 more)" in verdict.lines("job 12")[1]
    waste.keep(folder, verdict)
    assert not list(tmp_path.glob("*.monitor.json"))
