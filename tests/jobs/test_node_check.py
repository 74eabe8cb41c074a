"""A job measures its nodes, and goes back to the queue without those that are slow or do not answer."""

import re
import sys
from pathlib import Path

import pytest
import torch
from checkout import Checkout
from cluster import running_cluster
from conftest import succeeded

# It starts every process of a job: MKL computes with instructions of 2003 on n2, and n3 stops at the check.
SICK = """#!/bin/bash
case $SLURMD_NODENAME-$* in
    n2-*) export MKL_CBWR=COMPATIBLE ;;
    n3-*node_check*) kill -STOP $$ ;;
esac
exec "$@"
"""
SLOW_NETWORK = ("tc", "qdisc", "add", "dev", "n4", "root", "tbf", "rate", "100mbit")
SLOW_NETWORK += ("burst", "70kb", "latency", "50ms")


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="no MKL, which can be told to be slow")
def test_slow_nodes_are_avoided_as_long_as_there_are_others(tmp_path: Path) -> None:
    """n1 to n3 begin. n4, whose network is slow, takes the place of one, and without it too few are left."""
    with running_cluster(nodes=5, gpus=0) as cluster:
        if cluster.run(["ip", "link", "show", "n4"]).returncode:
            pytest.skip("all nodes are this host, whose network cannot be slow for one of them")
        assert cluster.run(SLOW_NETWORK).returncode == 0
        checkout = Checkout(tmp_path / "a checkout", cluster)
        wrapper = tmp_path / "sick.sh"
        wrapper.write_text(SICK)
        wrapper.chmod(0o755)
        checkout.site(f"SITE_CONTAINER=({wrapper})\nSITE_NODE_CHECK=off\n")
        # The hang takes so long.
        shorter, longer = "READY_SECONDS = 30", "COMPUTE_SECONDS = 3"  # for the cores are busy
        checkout.insert("manygpus/jobs/doctor/node_check.py", f"{shorter}; {longer}", before="if __name__")
        (tmp_path / "tells.py").write_text("import os\nprint('rank on', os.environ['SLURMD_NODENAME'])\n")
        submit = (sys.executable, checkout.folder / "03_multigpu_ddp" / "submit.py", "--wait")
        shape = ("--nodes", 3, "--gpus", 0, "--mem", "1G", "--avoid-slow-nodes")
        done = succeeded(checkout.run(*submit, *shape, "--plain", tmp_path / "tells.py", cwd=tmp_path))
        job = int(done.stdout.split()[1])
        record = cluster.job(job)
        log, *others = [path.read_text() for path in sorted(checkout.folder.rglob(f"{job}_*_log.out"))]
        assert (record["Restarts"], record["ExcNodeList"]) == ("1", "n2,n3"), log
        ranks = [re.findall("rank on (n.)", text) for text in (log, *others)]
        assert ranks == [["n1"], ["n4"], ["n5"]], log
        first, second = log.split("\nended ", 1)
        assert {"n2", "n3"} == {*re.findall(r"^check   (n\d) ", first, re.MULTILINE)}, log
        assert {"n4"} == {*re.findall(r"^check   (n\d) ", second, re.MULTILINE)}, log
        assert "check   n4 " in done.stdout
        listed = succeeded(checkout.python("slurm/jobs.py")).stdout
        assert re.search(rf"^{job} .* done .*n4 ", listed, re.MULTILINE), listed
