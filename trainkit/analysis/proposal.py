"""The page that computing centres ask for: how much time, why so many devices, and how that is known."""

import pandas as pd

from trainkit.analysis import comparison
from trainkit.analysis.advice import interval
from trainkit.analysis.answer import LEGEND, InWords, number, text
from trainkit.analysis.text import escaped, markdown

MOST_NODES = 10  # that are named


def proposal(words: InWords, trainings: int, figures: list[str]) -> str:
    """The page, in Markdown, for so many trainings with the recommended choice, which has to be there."""
    answer, rows = words.answer, words.rows
    best, steady = answer.best, rows[~rows.warmup]
    low, middle, high = (number(trainings * hours) for hours in interval(best.hours))
    table, marks = words.table(words.few())
    limits = [words.how_sure(), *marks, *words.unknown(), *words.trust()[1:]]
    if rows.dataset.iloc[0] == "synthetic":
        limits.append(
            "Measured with generated digits, not with MNIST: the accuracies say nothing about MNIST."
        )
    sections = {
        "What is asked for": [
            f"{escaped(words.choice(best))}, for {trainings:,} training{'s' * (trainings > 1)}: **{middle} "
            f"{words.hours}** ({low} to {high}).",
            f"A training ({escaped(answer.goal)}) takes {text(best.seconds / 60)} minutes.",
        ],
        "Why so many": [
            f"It is {escaped(words.why)}.",
            markdown(table),
            LEGEND,
            *(f"![{name}]({name})" for name in figures if "speedup" in name or "cost" in name),
        ],
        "Machine and software": [_listed(_machine(rows))],
        "How it was measured": [
            f"{rows.run_id.nunique()} runs, {len(steady)} epochs after the warm-up of each process, timed on "
            "the slowest rank with its device synchronised.",
            words.trust()[0],
        ],
        "Limits": [_listed(limits)],
    }
    pages = ["# Request for computing time"]
    pages += ["\n\n".join([f"## {title}", *texts]) for title, texts in sections.items()]
    return "\n\n".join(pages) + "\n"


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


def _listed(lines: list[str]) -> str:
    return "\n".join(f"- {escaped(line)}" for line in lines)
