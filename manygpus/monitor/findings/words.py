"""Words that the sentences of several findings share."""

from manygpus.monitor.findings.finding import Location
from manygpus.monitor.sample_tables import GpuId, RankId

# Of more, only their number is named.
MOST_NODES_TO_NAME = 2
MOST_LOCATIONS_TO_NAME = 8


def name_locations(locations: list[Location]) -> str:
    """Name locations in words, such as "GPUs 0, 1 on n1"; for many only how many."""
    if isinstance(locations[0], str):
        if len(locations) > MOST_NODES_TO_NAME:
            return count(len(locations), "node")
        return " and ".join(locations)
    noun = "GPU" if isinstance(locations[0], GpuId) else "rank"
    nodes = sorted({location.node for location in locations})
    if len(nodes) > MOST_NODES_TO_NAME or len(locations) > MOST_LOCATIONS_TO_NAME:
        return f"{count(len(locations), noun)} on {count(len(nodes), 'node')}"
    texts = []
    for node in nodes:
        numbers = sorted(_number(location) for location in locations if location.node == node)
        plural = "s" if len(numbers) > 1 else ""
        texts.append(f"{noun}{plural} {', '.join(map(str, numbers))} on {node}")
    return " and ".join(texts)


def options_in_brackets(options: str, is_plain: bool) -> str:
    """Return options of the kit in brackets; "" for a script that does not have them."""
    return "" if is_plain else f" ({options})"


def debugger(is_plain: bool) -> str:
    return "py-spy dump" if is_plain else "--debug"


def _number(location: GpuId | RankId) -> int:
    return location.index if isinstance(location, GpuId) else location.rank


def count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
