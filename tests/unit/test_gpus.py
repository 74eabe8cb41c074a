"""The GPUs of a job, as NVML shows them: their rows, and what is missing there."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import fake_nvml
import pytest
from monitoring import THIS_NAMESPACE, Row, with_nvidia_smi

from manygpus.monitor import gpus, samples

# By Slurm, which shows only these.
GIVEN = {"SLURM_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": None}
CELLS = {name for name, kinds in samples.COLUMNS.items() if samples.GPU in kinds} - {"time"}
Rows = list[list[Row]]  # of each sample
TakeSamples = Callable[..., Rows]


@pytest.fixture
def notes() -> list[str]:
    """The notes of `take_samples`."""
    return []


@pytest.fixture
def take_samples(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> TakeSamples:
    """Return a function that takes samples of a node whose NVML answers by a script.

    It takes the GPUs of the script, how many samples, variables of the environment (None: not set), the rank
    of each process, whether its processes can be seen, and the error of NVML's start.
    """

    def take(
        scripted: list[dict[str, object]] = (),
        number: int = 1,
        environment: Mapping[str, str | None] | None = None,
        ranks: dict[int, int] | None = None,
        sees_processes: bool = True,
        init: str | None = None,
    ) -> Rows:
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.Nvml(scripted, init=init))
        monkeypatch.setattr(gpus, "PROCESSES_OF_THE_HOST", THIS_NAMESPACE if sees_processes else "another")
        for name, value in (GIVEN | (environment or {})).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        monitor = gpus.Gpus(notes.append)
        return [monitor.sample(ranks or {}) for _ in range(number)]

    return take


def empty_cells(row: Row) -> set[str]:
    return {name for name in CELLS if row.get(name) is None}


def numbers(rows: list[Row]) -> list[int]:
    return [row["number"] for row in rows]


def test_a_gpu_is_written_down_in_the_units_of_its_columns(
    take_samples: TakeSamples, notes: list[str]
) -> None:
    busy = {
        "memory_mb": 40_000,
        "utilisation": 97,
        "power_w": 612.5,
        "energy_j": 123456.789,
        "clock_mhz": 1755,
        "temperature_c": 66,
        "throttled": "SwPowerCap",
        "pids": (8, 7, 1),
    }
    scripted = [{}, busy, {"pids": (1,)}, {"name": "NVIDIA A100"}]
    ((first, second, third, fourth),) = take_samples(scripted, ranks={7: 0, 8: 11})
    assert numbers([first, second, third, fourth]) == [0, 1, 2, 3]
    expected = {name: busy[name] for name in busy.keys() & samples.COLUMNS}
    expected |= {
        "throttled": "power",
        "ranks": "0+11",
        "name": fake_nvml.GPU["name"],
        "memory_limit_mb": 85_000,
        "power_limit_w": 700,
        "clock_limit_mhz": 1980,
    }
    assert expected.items() <= second.items()
    assert (first["throttled"], first["ranks"], third["ranks"]) == ("-", "-", "?")
    assert fourth["name"] == "NVIDIA A100"
    assert notes == []


def test_where_processes_cannot_be_seen_nobody_knows_the_ranks(take_samples: TakeSamples) -> None:
    ((row,),) = take_samples([{}], sees_processes=False)
    assert row["ranks"] == "?"


def test_why_a_clock_is_low(take_samples: TakeSamples, notes: list[str]) -> None:
    causes = {
        "": "-",
        "GpuIdle": "-",
        "HwSlowdown HwThermalSlowdown": "heat",
        "SwThermalSlowdown": "heat",
        "SwPowerCap GpuIdle": "power",
        "HwSlowdown HwPowerBrakeSlowdown": "power",
        "SwPowerCap SwThermalSlowdown": "heat+power",
        "HwSlowdown": "other",
        "GpuIdle ApplicationsClocksSetting": "-",
        "GpuIdle HwSlowdown": "-",
        "GpuIdle ApplicationsClocksSetting SwPowerCap": "power+other",
        "ApplicationsClocksSetting SwPowerCap": "power+other",
    }
    rows = take_samples([{"throttled": list(causes)}], number=len(causes))
    assert [row["throttled"] for (row,) in rows] == list(causes.values())
    assert notes == []


@pytest.mark.parametrize(
    ("reading", "failing", "columns"),
    [
        ("the name", "name", ("name",)),
        ("memory", "memory_mb", ("memory_mb", "memory_limit_mb")),
        ("processes", "pids", ("ranks",)),
        ("throttling", "throttled", ("throttled",)),
    ],
)
def test_a_reading_that_fails_is_an_empty_cell(
    reading: str, failing: str, columns: tuple[str, ...], take_samples: TakeSamples, notes: list[str]
) -> None:
    """A note for each GPU, and the others go on."""
    broken = {failing: "NOT_SUPPORTED"}
    for rows in take_samples([broken, {}, broken], number=3):
        assert [empty_cells(row) for row in rows] == [{*columns}, set(), {*columns}]
    assert {*notes} == {f"GPU {number}: NVML does not report {reading} (Not Supported)" for number in (0, 2)}


def test_a_gpu_that_is_lost_has_empty_cells(take_samples: TakeSamples, notes: list[str]) -> None:
    lost = dict.fromkeys(fake_nvml.GPU, "GPU_IS_LOST")
    ((row, other),) = take_samples([lost, {}])
    assert empty_cells(row) == CELLS - {"what", "number"} and empty_cells(other) == set()
    (note,) = notes
    assert note.startswith("GPU 0: ") and all(reading in note for reading in gpus.READINGS)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", [2, 0]),
        ("1,7,2", [1]),
        ("-1", []),
        ("", []),
        ("GPU-00000003-0000-0000-0000-000000000000,1", [3, 1]),
        (None, [0, 1, 2, 3]),
    ],
)
def test_which_gpus_are_the_jobs(
    visible: str | None, expected: list[int], take_samples: TakeSamples, notes: list[str]
) -> None:
    (rows,) = take_samples([{}] * 4, environment={"CUDA_VISIBLE_DEVICES": visible})
    assert numbers(rows) == expected
    assert notes == []


@pytest.mark.parametrize(
    ("environment", "sees_processes", "first", "second"),
    [
        ({}, True, [1], [1, 3]),
        ({}, False, [0, 1, 2, 3], [0, 1, 2, 3]),
        ({"SLURM_JOB_ID": "1"}, True, [0, 1, 2, 3], [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, True, [0, 1], [0, 1]),
    ],
    ids=["not given", "processes of the host", "by Slurm", "chosen"],
)
def test_gpus_that_nobody_has_given_are_those_with_a_rank(
    environment: dict[str, str],
    sees_processes: bool,
    first: list[int],
    second: list[int],
    take_samples: TakeSamples,
) -> None:
    """From then on, or where one cannot see; there is another's, too."""
    scripted = [{}, {"pids": [(7,), ()]}, {"pids": (1,)}, {"pids": [(), (7,)]}]
    rows = take_samples(
        scripted,
        number=2,
        environment={"SLURM_JOB_ID": None} | environment,
        ranks={7: 0},
        sees_processes=sees_processes,
    )
    assert [numbers(of_sample) for of_sample in rows] == [first, second]


def test_slices_of_a_card(take_samples: TakeSamples, notes: list[str]) -> None:
    """NVML shows their memory and processes, and the rest of whole cards only."""
    alike = {"name": "NVIDIA A100 MIG 1g.5gb", "memory_limit_mb": 5_000, "pids": (3,)}
    slices = [{"uuid": f"MIG-{letter}"} | alike for letter in "ab"]
    # One that is refused is left out alone.
    chosen = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-gone,MIG-b"}
    (rows,) = take_samples([{}, *slices], environment=chosen, ranks={3: 3})
    assert numbers(rows) == [0, 2]
    known = {"what", "number", "name", "memory_mb", "memory_limit_mb", "ranks"}
    for row in rows:
        assert (row["memory_limit_mb"], row["ranks"]) == (5_000, "3")
        assert empty_cells(row) == CELLS - known
    assert notes[0].startswith("GPU 0: NVML does not report utilisation, power,")


@pytest.mark.parametrize(
    ("init", "environment", "has_driver", "problem"),
    [
        ("LIBRARY_NOT_FOUND", {"CUDA_VISIBLE_DEVICES": "0"}, True, "NVML Shared Library Not Found"),
        ("DRIVER_NOT_LOADED", {"SLURM_GPUS_ON_NODE": "4"}, True, "Driver Not Loaded"),
        (None, {"SLURM_GPUS_ON_NODE": "4"}, True, "it lists none"),
        # Virtual ones.
        (None, {"SLURM_GPUS_ON_NODE": "4"}, False, None),
        # Hidden ones.
        (None, {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "-1"}, True, None),
        (None, {}, True, None),
    ],
)
def test_gpus_are_missed_where_there_should_be_some(
    init: str | None,
    environment: dict[str, str],
    has_driver: bool,
    problem: str | None,
    take_samples: TakeSamples,
    notes: list[str],
    tmp_path: Path,
) -> None:
    driver = with_nvidia_smi(tmp_path) if has_driver else {"PATH": "/nonexistent"}
    assert take_samples(init=init, environment=driver | environment) == [[]]
    if problem is None:
        assert notes == []
    else:
        (note,) = notes
        assert note.startswith(f"NVML shows no GPU of this job ({problem})")
