"""Metrics of a classifier over all ranks, computed from counts, which unlike means can be added up."""

import torch
import torch.nn.functional as F

from manygpus import Metric
from manygpus.distributed import process_group

BINS = 10  # bins of confidence, for the calibration


class Counts:
    """The counts of one evaluation. Pass `loss` to `evaluate`, and then call `metrics`.

    `confusion` (classes, classes) has the number of rows of each class (first index) that were taken for each
    class. `bins` (BINS, 3) has, for each tenth of confidence, the number of rows, the sum of their
    confidence, and how many of them are right. The confidence is the probability of the chosen class.
    `probabilities` (classes,) are the sums of the probabilities. All are float64, in which counts are exact.
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self.confusion = torch.zeros(classes, classes, dtype=torch.float64, device=device)
        self.bins = torch.zeros(BINS, 3, dtype=torch.float64, device=device)
        self.probabilities = torch.zeros(classes, dtype=torch.float64, device=device)

    def loss(self, output: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the cross entropy of a batch, without weights, and count its rows. `evaluate` calls it."""
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
        """Return the metrics of all ranks' rows together. All ranks have to call it. `names` are the classes.

        These are, for each class, precision, recall, F1, its share of the rows, and its mean probability,
        which should equal the share; the balanced accuracy; the confusion matrix; the bins of the
        calibration, and its expected error. A metric without rows is NaN, such as the precision of a class
        that was never chosen.
        """
        # This is the only step that involves other ranks: counts are added up first, and divided afterwards.
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
