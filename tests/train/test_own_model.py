"""A copy of stage 03 with another network, data set and name trains, is sent, swept and compared."""

from pathlib import Path

import pandas as pd
import pytest
from checkout import Checkout
from cluster import RunningCluster
from conftest import REPOSITORY, STAGES, Script, one_error, rows_of, succeeded

from trainkit.compare import comparison

# What the user writes in place of the stage's lines.
NETWORK = """

class Tables(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(20, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, CLASSES))


def tables(seed: int, rows: int) -> data.Split:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 20, generator=random)
    return data.Split("random tables", inputs, TARGETS)


def main() -> None:"""
CLASSIFY = ("F.cross_entropy", "3", "(inputs[:, :2].sum(1, keepdim=True) > torch.tensor([-1.0, 1.0])).sum(1)")
REGRESS = ("F.mse_loss", "1", "inputs[:, :2].sum(1, keepdim=True)")
SMALL = ("--epochs", 2, "--batch-size", 50, "--no-cuda")


def own_training(task: tuple[str, str, str]) -> str:
    loss, classes, targets = task
    changes = {
        "import Net, Run": "import Run",
        "\n\ndef main() -> None:": NETWORK.replace("CLASSES", classes).replace("TARGETS", targets),
        "data.load(opts.dataset, opts.data_dir)": "tables(1, 2000), tables(2, 500)",
        "Net(opts.width).to(here.device, memory_format=torch.channels_last)": "Tables().to(here.device)",
        "F.nll_loss": loss,
        'Run("ddp"': 'Run("tables"',
    }
    text = STAGES["ddp"].read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, cluster: RunningCluster) -> Checkout:
    made = Checkout(tmp_path_factory.mktemp("own") / "a checkout", cluster)
    (made.folder / "03_multigpu_ddp" / "tables.py").write_text(own_training(CLASSIFY))
    return made


@pytest.mark.parametrize("loader", [("resident",), ("workers", "--num-workers", "1")], ids=" ".join)
def test_it_trains_and_is_recorded_as_what_it_is(loader: tuple, script: Script, tmp_path: Path) -> None:
    own = tmp_path / "tables.py"
    own.write_text(own_training(CLASSIFY))
    succeeded(script(own, *SMALL, "--epochs", 3, "--loader", *loader, "--results-dir", tmp_path, ranks=2))
    rows = rows_of(tmp_path)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert (row["stage"], row["dataset"], row["model"]) == ("tables", "random tables", "Tables")
        assert row["flops_per_image"] == 2 * (2 * 20 * 64 + 3 * 64 * 3)  # no gradient of the inputs
        assert (row["precision"], row["images"], row["test_images"]) == ("fp32", 2000, 500)
    assert 0 < rows[-1]["train_loss"] < rows[0]["train_loss"] < 3
    assert rows[-1]["test_accuracy"] > 80  # chance is below 50


def test_a_regression_has_no_accuracy(script: Script, tmp_path: Path) -> None:
    own = tmp_path / "tables.py"
    own.write_text(own_training(REGRESS))
    done = succeeded(script(own, *SMALL, "--results-dir", tmp_path))
    assert "accuracy" not in done.stdout
    rows = rows_of(tmp_path)
    assert pd.isna(rows[-1]["test_accuracy"])
    assert rows[-1]["test_loss"] < 1  # guessing the mean gives 2


@pytest.mark.parametrize(
    ("change", "arguments", "sentence"),
    [
        (("", ""), ("--precision", "bf16"), "Tables computes in fp32 only: leave out --precision bf16"),
        (("run.add(loss)", "pass"), (), "0 losses after 1 steps: call run.add(loss) once in each"),
        (("run.add(loss)", "run.add(loss); break"), (), "epoch 1 was left early: let the loop"),
    ],
    ids=["precision", "loss not told", "loop left"],
)
def test_a_mistake_is_one_sentence(
    change: tuple, arguments: tuple, sentence: str, script: Script, tmp_path: Path
) -> None:
    own = tmp_path / "tables.py"
    own.write_text(own_training(CLASSIFY).replace(*change))
    done = script(own, *SMALL, *arguments, "--results-dir", tmp_path)
    assert one_error(done).startswith(f"error: {sentence}")


def test_a_sweep_of_it_is_compared_apart_from_mnist(checkout: Checkout) -> None:
    script, out = checkout.folder / "03_multigpu_ddp" / "tables.py", checkout.folder / "a sweep"
    arguments = ("--script", script, "--gpus", "1,2", "--batch-size", 50, "--epochs", 2)
    done = succeeded(checkout.python("slurm/sweep.py", *arguments, "--no-cuda", "--out", out))
    table = pd.read_csv(out / "comparison.csv")
    assert list(zip(table.stage, table.devices, table.model, strict=True)) == [
        ("tables", 1, "Tables"),
        ("tables", 2, "Tables"),
    ]
    assert table.speedup.notna().all()
    assert "tables on 2 CPU workers trained" in done.stdout

    mnist = REPOSITORY / "results" / "sample" / "cpu-2-cores" / "runs.csv"
    both, alone = (
        comparison.compare(comparison.summarize(comparison.load_some(paths)[0]))
        for paths in ([out, mnist], [mnist])
    )
    assert both[both.model == "Net"].speedup.dropna().tolist() == alone.speedup.dropna().tolist()
    assert set(both[both.model == "Tables"].baseline) == {"tables"}
