"""The words that the sentences of several findings share."""

import pytest

from manygpus.monitor.findings.finding import Location
from manygpus.monitor.findings.words import name_locations
from manygpus.monitor.sample_tables import GpuId, RankId


@pytest.mark.parametrize(
    ("locations", "name"),
    [
        (["n1"], "n1"),
        (["n1", "n2"], "n1 and n2"),
        (["n1", "n2", "n3"], "3 nodes"),
        ([GpuId("n1", 1), GpuId("n1", 0)], "GPUs 0, 1 on n1"),
        ([GpuId("n1", 1), GpuId("n2", 1)], "GPU 1 on n1 and GPU 1 on n2"),
        ([RankId("n1", rank) for rank in range(9)], "9 ranks on 1 node"),
        ([GpuId(f"n{node}", 0) for node in range(3)], "3 GPUs on 3 nodes"),
    ],
)
def test_locations_are_named_or_counted(locations: list[Location], name: str) -> None:
    assert name_locations(locations) == name
