"""The scaling section of a proposal: its numbers, and what it objects to in the runs."""

import json
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, REPOSITORY, succeeded
from forking import Forking
from test_comparison import CPU, ddp, unpadded, write_run

from manygpus.errors import UserError
from manygpus.reports.advice import proposal

SCRIPT = REPOSITORY / "results" / "plot_results.py"
PUBLISHED = json.loads((REPOSITORY / "tools" / "bench" / "published.json").read_text())


def rows_of(page: Path) -> list[list[str]]:
    """The cells of all rows of numbers in a page of Markdown."""
    lines = [line.strip("| ") for line in unpadded(page).splitlines() if line.startswith("| ")]
    return [line.split(" | ") for line in lines if line[0].isdigit()]


def test_strong_and_weak_scaling_over_nodes(tmp_path: Path, forking: Forking) -> None:
    """Speedup, efficiency and node-hours of both, in Markdown and in LaTeX."""
    facts = {"model": "My_Net & 50%", "images": 60_000}
    write_run(tmp_path, "one", [10, 1000, 1000], **facts, global_batch=256)
    write_run(tmp_path, "ddp-one", [10, 900, 900], **facts, **ddp(1, global_batch=256))
    for devices, nodes, strong, weak in ((2, 1, 1800, 1900), (4, 1, 3000, 3600), (8, 2, 4000, 6400)):
        for name, speed, batch in (("strong", strong, 256), ("weak", weak, 256 * devices)):
            layout = ddp(devices, nodes=nodes, global_batch=batch)
            write_run(tmp_path, f"{name}-{devices}", [10, speed, speed], **facts, **layout)
    (tmp_path / "runs" / "broken.csv").touch()
    done = succeeded(forking.run(SCRIPT, tmp_path, "--proposal", "--out", tmp_path / "out", env=ENVIRONMENT))
    page = tmp_path / "out" / "proposal.md"
    strong, weak = rows_of(page)[:4], rows_of(page)[4:]
    # GPUs, nodes, batch, images/s, ms per step, s per epoch, speedup, efficiency, node-hours, runs
    assert strong[0] == ["1", "1", "256", "1,000", "256", "60", "1.00", "100", "0.004167", "1"]
    assert strong[3] == ["8", "2", "32", "4,000", "64", "15", "4.00", "50", "0.008333", "1"]
    assert weak[3] == ["8", "2", "2,048", "6,400", "320", "9.375", "6.40", "80", "0.005208", "1"]
    assert "at least 70 % is 4 GPUs on 1 node" in page.read_text()
    assert "broken.csv" in page.read_text() and "one node" not in page.read_text()
    assert "Strong scaling with a global batch of 256 images" in done.stdout
    latex = (tmp_path / "out" / "proposal.tex").read_text()
    assert r"My\_Net \& 50\%" in latex and latex.count(r"\toprule") == 2 and r"efficiency (\%)" in latex
    assert (tmp_path / "out" / "proposal.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "out" / "comparison.md").exists()


def objections_to(folder: Path) -> str:
    proposal.report([folder], folder / "out")
    return (folder / "out" / "proposal.md").read_text().partition("##")[2]


def test_what_a_reviewer_would_object_to(tmp_path: Path) -> None:
    """CPUs and one node; no run on one GPU, as in what others published of a large model."""
    for folder, facts in ((tmp_path / "cpu", {"device_name": CPU}), (tmp_path / "gpu", {})):
        write_run(folder, "one", [10, 1000, 1000], **facts)
        write_run(folder, "two", [10, 1800, 1800], **facts, **ddp(2))
    assert "no basis" in objections_to(tmp_path / "cpu") and "no basis" not in objections_to(tmp_path / "gpu")
    assert "one node" in objections_to(tmp_path / "gpu") and "weak" in objections_to(tmp_path / "gpu")

    large = tmp_path / "large"
    (series,) = (one for one in PUBLISHED if one["name"] == "HF ultrascale DP H100")
    for point in series["points"]:
        gpus, batch = point["gpus"], point["batch_per_gpu"]
        layout = ddp(gpus, nodes=point["nodes"], global_batch=gpus * batch, images=61_440)
        for repeat in "abc":
            write_run(large, f"{gpus}{repeat}", [point["throughput"]] * 3, **layout)
    objections = objections_to(large)
    assert "relative to 8 GPUs" in objections and "one node" not in objections
    assert "--repeats" not in objections
    rows = rows_of(large / "out" / "proposal.md")
    assert [row[:2] for row in rows] == [
        ["8", "1"],
        ["16", "2"],
        ["32", "4"],
        ["64", "8"],
        ["128", "16"],
        ["256", "32"],
    ]
    assert rows[-1][6:8] == ["12.51", "39"]


def test_runs_that_are_no_proposal(tmp_path: Path) -> None:
    """One number of GPUs, and several trainings, of which one has to be chosen."""
    one = tmp_path / "one"
    write_run(one, "one", [10, 1000, 1000])
    with pytest.raises(UserError, match="two numbers of GPUs"):
        proposal.report([one], one / "out")
    assert not (one / "out").exists()

    several = tmp_path / "several"
    for stage in ("mine", "yours"):
        write_run(several, stage, [10, 1800, 1800], **ddp(2, stage=stage))
    with pytest.raises(UserError, match="mine, yours"):
        proposal.report([several], several / "out")

    sets = tmp_path / "sets"
    for precision in ("bf16", "fp32"):
        write_run(sets, f"{precision}-1", [10, 1000, 1000], precision=precision)
        write_run(sets, f"{precision}-2", [10, 1800, 1800], precision=precision, **ddp(2))
    with pytest.raises(UserError, match="--set"):
        proposal.report([sets], sets / "out")
    proposal.report([sets], sets / "out", set_number=2)
    assert "fp32" in (sets / "out" / "proposal.md").read_text()
