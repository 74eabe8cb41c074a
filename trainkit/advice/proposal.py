"""The page that computing centres ask for: how much time, why so many devices, and the evidence."""

import pandas as pd

from trainkit.advice.advice import interval
from trainkit.advice.answer import LEGEND, AnswerText, number, text
from trainkit.compare import comparison, page

MOST_NODES = 10  # that are named


def proposal(words: AnswerText, trainings: int, figures: list[page.Figure]) -> list[page.Block]:
    """Return the page for `trainings` trainings with the recommended choice, which has to exist."""
    rows, best = words.rows, words.answer.best
    low, middle, high = (number(trainings * hours) for hours in interval(best.hours))
    table, marks = words.table(words.best_options())
    how_known, *limits = words.trust()
    if rows.dataset.iloc[0] == "synthetic":
        limits.append("Measured with generated digits, not with MNIST: their accuracies say nothing of it.")
    return [
        page.Heading("What is asked for"),
        page.Text(
            f"{words.choice(best)}, for {trainings:,} training{'s' * (trainings > 1)}: {middle} "
            f"{words.hours} ({low} to {high})."
        ),
        page.Text(f"A training ({words.answer.goal}) takes {text(best.seconds / 60)} minutes."),
        page.Heading("Why so many"),
        page.Text(f"It is {words.why}."),
        page.Table(table),
        page.Text(LEGEND),
        *figures,
        page.Heading("Machine and software"),
        page.Notes(_machine(rows)),
        page.Heading("How it was measured"),
        page.Text(
            f"{rows.run_id.nunique()} runs, {(~rows.warmup).sum()} epochs after the warm-up of each process, "
            f"timed on the slowest rank with its device synchronised. {how_known}"
        ),
        page.Heading("Limits"),
        page.Notes([words.how_sure(), *marks, *words.unknown(), *limits]),
    ]


def _machine(rows: pd.DataFrame) -> list[str]:
    row, nodes = rows.iloc[0], sorted(set(rows.node_list) - {""})
    versions = {"PyTorch": "torch_version", "CUDA": "cuda_version", "this program": "git_commit"}
    found = {name: sorted(set(rows[column]) - {""}) for name, column in versions.items()}
    where = f" ({', '.join(nodes[:MOST_NODES])})" if nodes else ""
    settings = comparison.common(rows.assign(train_images=rows.images.max()))
    return [
        f"{row.device_name}, up to {rows.devices.max()} on {rows.nodes.max()} node(s){where}",
        ", ".join(f"{name} {', '.join(values)}" for name, values in found.items() if values),
        f"{comparison.with_model(row.dataset, row.model)}: {settings}",
    ]
