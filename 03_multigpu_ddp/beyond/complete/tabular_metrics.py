"""Metrics of a classifier over all ranks: made of counts, which can be summed up, as means cannot."""

import torch
import torch.nn.functional as F

from trainkit.distributed import process_group
from trainkit.training.evaluation import Metric

BINS = 10  # of confidence, for the calibration


class Counts:
    """Counts of one evaluation: give `loss` to `evaluate`, then ask for the metrics.

    `confusion` (classes, classes) has the rows of each class (first index) that were taken for each class.
    `bins` (BINS, 3) has the rows whose confidence is in each tenth of 0 to 1, the sum of their confidence,
    and how many of them are right. The confidence is the probability of the class that was chosen.
    `probabilities` (classes,) are the sums of the probabilities. All are float64, in which counts are exact.
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self.confusion = torch.zeros(classes, classes, dtype=torch.float64, device=device)
        self.bins = torch.zeros(BINS, 3, dtype=torch.float64, device=device)
        self.probabilities = torch.zeros(classes, dtype=torch.float64, device=device)

    def loss(self, output: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the cross entropy, without weights, of a batch, and count its rows; `evaluate` calls it."""
        classes = len(self.confusion)
        probabilities = output.double().softmax(1)
        self.probabilities += probabilities.sum(0)
        confidence, chosen = probabilities.max(1)
        pairs = (targets * classes + chosen).bincount(minlength=classes**2)
        self.confusion += pairs.view(classes, classes)
        bins = (confidence * BINS).long().clamp(0, BINS - 1)
        for column, values in enumerate((torch.ones_like(confidence), confidence, chosen == targets)):
            self.bins[:, column] += bins.bincount(values.double(), minlength=BINS)
        return F.cross_entropy(output, targets, reduction=reduction)

    def metrics(self, names: tuple[str, ...]) -> list[Metric]:
        """Return the metrics of all ranks' rows together; all ranks have to call it. `names` are the classes.

        Per class precision, recall, F1, its share of the rows, and its mean probability, which should be that
        share; balanced accuracy; the confusion; the bins of the calibration, and its expected error. What has
        no rows is NaN, such as the precision of a class that was never chosen.
        """
        # The only step that knows of ranks: sums of counts first, quotients afterwards.
        confusion = process_group.sum_in_place(self.confusion).cpu()
        rows, confidence, right = process_group.sum_in_place(self.bins).cpu().unbind(1)
        probabilities = process_group.sum_in_place(self.probabilities).cpu()
        hits = confusion.diag()
        chosen = confusion.sum(0)
        there = confusion.sum(1)
        per_class = {
            "precision": hits / chosen,
            "recall": hits / there,
            "f1": 2 * hits / (chosen + there),
            "share": there / rows.sum(),
            "mean_probability": probabilities / rows.sum(),
        }
        calibration_error = (right - confidence).abs().sum() / rows.sum()
        metrics = [
            Metric("balanced_accuracy", "all classes", (hits / there).nanmean().item()),
            Metric("calibration_error", "all rows", calibration_error.item()),
        ]
        for metric, values in per_class.items():
            for name, value in zip(names, values.tolist(), strict=True):
                metrics.append(Metric(metric, name, value))
        for name, counts in zip(names, confusion.tolist(), strict=True):
            for other, count in zip(names, counts, strict=True):
                metrics.append(Metric("rows", f"{name} taken for {other}", count))
        for number in rows.nonzero().flatten().tolist():
            bin_name = f"confidence {number / BINS:g} to {(number + 1) / BINS:g}"
            metrics.append(Metric("rows", bin_name, rows[number].item()))
            metrics.append(Metric("mean_confidence", bin_name, (confidence[number] / rows[number]).item()))
            metrics.append(Metric("accuracy", bin_name, (right[number] / rows[number]).item()))
        return metrics


def in_one_line(metrics: list[Metric]) -> str:
    """Format the metrics for a log, in percent."""
    percent = {(metric.metric, metric.of): f"{100 * metric.value:.1f} %" for metric in metrics}
    recalls = ", ".join(f"{of} {text}" for (metric, of), text in percent.items() if metric == "recall")
    return (
        f"recall {recalls} | balanced accuracy {percent['balanced_accuracy', 'all classes']} | "
        f"calibration error {percent['calibration_error', 'all rows']}"
    )
