"""When Slurm would start a job: what a dry run and how_many_gpus.py say of the queue."""

import re
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from checkout import Checkout
from cluster import running_cluster
from conftest import REPOSITORY, succeeded
from json_documents import document

pytestmark = pytest.mark.full

RUNS = REPOSITORY / "results" / "sample" / "cpu-xeon-2-cores" / "scaling" / "w32.csv"
# Slurm's plan has steps of a minute, and what is printed has no seconds.
PRECISION = timedelta(minutes=2)


def queue(checkout: Checkout, *options: object) -> list[dict]:
    """What how_many_gpus.py says of the queue."""
    asked = (RUNS, "--target", 94, "--batch-size", 128, "--json", *options)
    done = succeeded(checkout.python("results/how_many_gpus.py", *asked))
    return document(done.stdout, "how_many")["queue"]


def test_the_start_and_the_result_behind_a_job(tmp_path: Path) -> None:
    with running_cluster(accounting=True) as cluster:
        checkout = Checkout(tmp_path / "a checkout", cluster)
        dry_run = ("--dataset", "synthetic", "--gpus", 2, "--dry-run")
        before = cluster.submit("--nodes=2", "--exclusive", "--time=30", "--wrap", "sleep 1000")
        end = datetime.fromisoformat(cluster.wait(before, until="RUNNING")["EndTime"])
        done = succeeded(checkout.submit_py("ddp", *dry_run))
        start, latest_end = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d", done.stderr)
        assert abs(datetime.fromisoformat(start) - end) < PRECISION
        assert datetime.fromisoformat(latest_end) - datetime.fromisoformat(start) == timedelta(minutes=30)
        # No node has four GPUs.
        *possible, refused = queue(checkout, "--gpus", "1,2,4", "--gpus-per-node", 4)
        assert [row["devices"] for row in possible] == [1, 2]
        for row in possible:
            assert abs(datetime.fromisoformat(row["start"]) - end) < PRECISION
            assert row["result"] > row["start"] and row["past_waits_s"] == []
        assert refused["refusal"] and not refused["start"]

        # It starts when the other one ends, and that is earlier than it was estimated.
        behind = cluster.submit("--gpus-per-node=2", "--time=5", "--wrap", "true")
        cluster.run(["scancel", before])
        assert cluster.wait(behind)["JobState"] == "COMPLETED"
        for _ in range(60):
            of_two = queue(checkout, "--gpus", 2)[0]
            if of_two["past_waits_s"]:
                break
            time.sleep(0.5)
        assert len(of_two["past_waits_s"]) == 1
        assert datetime.fromisoformat(of_two["start"]) < end - PRECISION


def test_without_slurm_nothing_is_said_of_a_queue(tmp_path: Path) -> None:
    assert queue(Checkout(tmp_path / "a checkout")) == []
