"""The classifier on a table: its class weights and its metrics are those of one process, over any ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import COMPLETE, Script, furthest, rows_of, succeeded, weights_of
from sklearn import calibration
from sklearn import metrics as judges

from manygpus.record import records

SCRIPT = COMPLETE / "tabular.py"
SMALL = ("--train-size", 900, "--test-size", 1000, "--batch-size", 30, "--epochs", 2, "--no-cuda")
# SGD, as to Adadelta and Adam gradients that are twice as large are nearly the same.
EXACT = (*SMALL, "--recipe", "sgd", "--lr", 0.05, "--save-model", "--timeout", 60)
WORKERS = ("--loader", "workers", "--num-workers", 1)
CUT = ("--accumulate", 5)
TRAININGS = {
    "exact": (1,),
    "exact on 2": (2,),
    "exact on 3": (3,),
    "exact cut": (1, *CUT),
    "exact cut on 2": (2, *CUT),
    "naive": (1, "--weights", "naive"),
    "naive cut on 2": (2, *CUT, "--weights", "naive"),
    "none": (1, "--weights", "none"),
}
ROUNDING = 1e-5  # it came to a twentieth of that here


class Trained:
    """The files of a training's folder: its rows, metrics and weights; and its output."""

    def __init__(self, folder: Path, printed: str) -> None:
        self.folder, self.printed = folder, printed
        self.rows = rows_of(folder)
        self.metrics: dict[int, dict[tuple[str, str], float]] = {}
        for csv in (folder / "runs").glob("*.csv"):
            for row in records.read_metrics(csv):
                self.metrics.setdefault(row["epoch"], {})[row["metric"], row["of"]] = row["value"]
        self.weights = weights_of(folder)


def train(script: Script, folder: Path, ranks: int, *arguments: object) -> Trained:
    done = succeeded(script(SCRIPT, *EXACT, *arguments, "--results-dir", folder, ranks=ranks))
    return Trained(folder, done.stdout)


@pytest.fixture(scope="module")
def trained(script: Script, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    folder = tmp_path_factory.mktemp("tabular")
    return {name: train(script, folder / name, *arguments) for name, arguments in TRAININGS.items()}


def test_exact_weights_train_as_one_process(trained: dict[str, Trained]) -> None:
    for name in ("exact on 2", "exact on 3", "exact cut", "exact cut on 2"):
        assert furthest(trained[name].weights, trained["exact"].weights) < ROUNDING, name
        for row, of_one in zip(trained[name].rows, trained["exact"].rows, strict=True):
            assert row["train_loss"] == pytest.approx(of_one["train_loss"], rel=1e-4)


def test_naive_weights_do_not(trained: dict[str, Trained]) -> None:
    """On the whole batch they are the same; in shards of 3 rows they are not."""
    assert furthest(trained["naive"].weights, trained["exact"].weights) < ROUNDING
    assert furthest(trained["naive cut on 2"].weights, trained["exact"].weights) > 1000 * ROUNDING


def test_weights_are_for_the_rare_class(trained: dict[str, Trained]) -> None:
    recalls = [trained[name].metrics[2]["recall", "failing"] for name in ("none", "naive cut on 2", "exact")]
    assert recalls == sorted(recalls) and recalls[0] < 0.2 and recalls[2] > 0.4


@pytest.mark.parametrize("name", ["exact", "exact on 2", "exact on 3"])
def test_metrics_are_those_of_scikit_learn(
    name: str, trained: dict[str, Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes them from the saved weights, on all test rows at once."""
    monkeypatch.syspath_prepend(COMPLETE)
    from tabular import TableNet
    from tabular_data import CLASSES, load

    test = load()[1].first(1000)
    network = TableNet(width=32)
    network.load_state_dict(trained[name].weights)
    with torch.no_grad():
        probabilities = network(test.inputs).double().softmax(1).numpy()
    truth, chosen, confidence = test.targets.numpy(), probabilities.argmax(1), probabilities.max(1)
    assert set(chosen) == {0, 1, 2}

    expected = {("balanced_accuracy", "all classes"): judges.balanced_accuracy_score(truth, chosen)}
    per_class = judges.precision_recall_fscore_support(truth, chosen)
    for metric, values in zip(("precision", "recall", "f1"), per_class, strict=False):
        expected |= {(metric, label): value for label, value in zip(CLASSES, values, strict=True)}
    per_class = {
        "share": [np.mean(truth == label) for label in range(3)],
        "mean_probability": probabilities.mean(0),
    }
    for metric, values in per_class.items():
        expected |= {(metric, label): value for label, value in zip(CLASSES, values, strict=True)}
    for label, line in zip(CLASSES, judges.confusion_matrix(truth, chosen), strict=True):
        expected |= {
            ("rows", f"{label} taken for {other}"): n for other, n in zip(CLASSES, line, strict=True)
        }
    right, sure = calibration.calibration_curve(chosen == truth, confidence, n_bins=10)
    rows, edges = np.histogram(confidence, bins=np.linspace(0, 1, 11))
    bins = [f"confidence {low:.2g} to {low + 0.1:.2g}" for low, n in zip(edges, rows, strict=False) if n]
    rows = rows[rows > 0]
    expected["calibration_error", "all rows"] = (rows * abs(right - sure)).sum() / 1000
    for metric, values in {"rows": rows, "accuracy": right, "mean_confidence": sure}.items():
        expected |= {(metric, label): value for label, value in zip(bins, values, strict=True)}
    # The file has six digits.
    assert trained[name].metrics[2] == pytest.approx(expected, rel=1e-5)
    last = trained[name].rows[-1]
    assert last["test_loss"] == pytest.approx(judges.log_loss(truth, probabilities), rel=1e-5)
    assert last["test_accuracy"] == pytest.approx(100 * judges.accuracy_score(truth, chosen), rel=1e-5)


def test_metrics_do_not_depend_on_the_ranks(trained: dict[str, Trained]) -> None:
    """666 of the 1000 test rows are not a third of what the metrics count; what is shown are those of all."""
    for name in ("exact on 2", "exact on 3"):
        for epoch, metrics in trained["exact"].metrics.items():
            assert trained[name].metrics[epoch] == pytest.approx(metrics, rel=1e-4), (name, epoch)
        assert f"failing {100 * metrics['recall', 'failing']:.1f} %" in trained[name].printed
    counted = [value for (metric, of), value in metrics.items() if metric == "rows" and "taken" in of]
    assert sum(counted) == 1000


def test_a_run_that_resumes_keeps_the_metrics_of_before(
    trained: dict[str, Trained], script: Script, tmp_path: Path
) -> None:
    """With rows from the processes of a loader, too."""
    places = ("--checkpoint-dir", tmp_path / "checkpoints", "--resume", "auto")
    for epochs in (1, 2):
        resumed = train(script, tmp_path, 2, *WORKERS, *places, "--epochs", epochs)
    assert "resumed from" in resumed.printed
    assert furthest(resumed.weights, trained["exact on 2"].weights) < ROUNDING
    assert resumed.metrics == trained["exact on 2"].metrics
