"""Print the phases and the all-reduces of the last step in a trace, for those who have no browser at hand.

Try: python exercises/20_profile/mine/events.py small 0
"""

import json
import re
import sys
from pathlib import Path

RUNS = Path(__file__).resolve().parent / "runs"
SHOWN = re.compile(r"ProfilerStep|data$|forward$|backward$|optimizer$|.*all_?reduce", re.IGNORECASE)


def main() -> None:
    run, rank = sys.argv[1:]
    trace = json.loads((RUNS / f"{run}.rank-{rank}.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and SHOWN.match(event["name"])]
    steps = [event for event in events if event["name"].startswith("ProfilerStep")]
    if not steps:
        sys.exit("There is no step in this trace.")
    last = max(steps, key=lambda event: event["ts"])
    print(f"rank {rank} of `{run}`, in ms from the start of its last step\n")
    print("   start      end  duration  thread")
    for event in sorted(events, key=lambda event: event["ts"]):
        start, duration = (event["ts"] - last["ts"]) / 1000, event["dur"] / 1000
        if 0 <= start <= last["dur"] / 1000:
            thread = "main" if event["tid"] == last["tid"] else "other"
            numbers = f"{start:8.2f} {start + duration:8.2f}  {duration:8.2f}"
            print(f"{numbers}  {thread:6}  {event['name']}")


if __name__ == "__main__":
    main()
