"""Show what each job asked Slurm for, what it used, and what would have been enough.

Try: python slurm/jobs.py
"""

from contextlib import suppress
from pathlib import Path

from trainkit import errors
from trainkit.config.command_line import Parser
from trainkit.errors import UserError, tell
from trainkit.jobs.site import read_site
from trainkit.monitor.sampled_job import CORES, SampledJob
from trainkit.record import samples


def main() -> None:
    Parser(description=__doc__).parse_args()
    jobs_dir = read_site().jobs_dir
    sampled = {path.parent for path in jobs_dir.glob(f"*/{samples.FOLDER}")}
    jobs = sorted(sampled, key=lambda job: (len(job.name), job.name))  # 9 before 10
    rows = [("job", "mem asked", "used", "enough", "cpus-per-task asked", "used", "enough")]
    rows += filter(None, map(_used, jobs))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        tell("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    tell(f"\nof the jobs in {jobs_dir}; enough: the peak and 20 % more, and what a resume may take.")
    tell("It is unknown (-) of jobs that run, and of those that did not end well.")
    tell("Jobs without samples, or without Slurm, are left out.")


def _used(job: Path) -> tuple[str, ...]:
    """Return the cells of a job; none if it asked Slurm for nothing, or was not sampled."""
    cells = {}
    with suppress(UserError, OSError):  # no samples, or some that cannot be read
        for n in SampledJob(job / samples.FOLDER).needs():
            enough = "-" if n.enough is None else f"{n.enough}{n.unit}"
            cells[n.option] = f"{n.asked:g}{n.unit}", f"{n.used:.1f}{n.unit}", enough
    of_each = [cells.get(option, ("-", "-", "-")) for option in ("--mem", CORES)]
    return (job.name, *of_each[0], *of_each[1]) if cells else ()


if __name__ == "__main__":
    errors.run(main)
