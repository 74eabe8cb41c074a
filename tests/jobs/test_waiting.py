"""When Slurm would start a job: what a dry run says of the queue."""

import re
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from checkout import Checkout
from cluster import running_cluster
from conftest import succeeded

pytestmark = pytest.mark.full

# Slurm's plan has steps of a minute, and what is printed has no seconds.
PRECISION = timedelta(minutes=2)


def test_the_start_behind_a_job(tmp_path: Path) -> None:
    with running_cluster(accounting=True) as cluster:
        checkout = Checkout(tmp_path / "a checkout", cluster)
        dry_run = ("--dataset", "synthetic", "--gpus", 2, "--dry-run")
        before = cluster.submit("--nodes=2", "--exclusive", "--time=30", "--wrap", "sleep 1000")
        end = datetime.fromisoformat(cluster.wait(before, until="RUNNING")["EndTime"])
        done = succeeded(checkout.submit_py("ddp", *dry_run))
        start, latest_end = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d", done.stderr)
        assert abs(datetime.fromisoformat(start) - end) < PRECISION
        assert datetime.fromisoformat(latest_end) - datetime.fromisoformat(start) == timedelta(minutes=30)

        # It starts when the other one ends, and that is earlier than it was estimated.
        behind = cluster.submit("--gpus-per-node=2", "--time=5", "--wrap", "true")
        cluster.run(["scancel", before])
        assert cluster.wait(behind)["JobState"] == "COMPLETED"
        for _ in range(60):
            done = succeeded(checkout.submit_py("ddp", *dry_run))
            if "waited" in done.stderr:
                break
            time.sleep(0.5)
        assert "of 1 job" in done.stderr
        (latest_end,) = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d", done.stderr)
        assert datetime.fromisoformat(latest_end) < end + timedelta(minutes=30) - PRECISION
