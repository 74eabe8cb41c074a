"""How much of the memories of a job was in use, for the findings on a GPU's memory and on a node's."""

import math

import pandas as pd

from manygpus.monitor.findings.finding import Location
from manygpus.monitor.findings.words import percent


def full_memories(tables: dict[Location, pd.DataFrame], least_share: float) -> dict[Location, float]:
    """Return the largest share in use of each memory of which at least that much was in use."""
    shares = {location: (rows.memory_mb / rows.memory_limit_mb).max() for location, rows in tables.items()}
    return {location: share for location, share in shares.items() if least_share <= share < math.inf}


def used_memory_sentence(used_share: float, memory: str, remedy: str) -> str:
    return f"{percent(used_share)} of {memory} was in use, and at 100 % the job fails: {remedy}."
