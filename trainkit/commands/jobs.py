"""Show the jobs of this checkout: what each one runs, its state, how long, and the verdict or why it failed.

Try: python slurm/jobs.py
"""

from contextlib import suppress
from pathlib import Path

from trainkit.config.command_line import Parser
from trainkit.errors import UserError, entrypoint, print_line, print_table
from trainkit.jobs import listing
from trainkit.jobs.site import read_site
from trainkit.monitor.requests import CORES, MEMORY, requests_of
from trainkit.monitor.sampled_job import SampledJob
from trainkit.record import samples

TITLES = ("job", "mem asked", "used", "enough", "cpus-per-task asked", "used", "enough")
# The options of sbatch that a row tells of.
OPTIONS = (MEMORY, CORES)
UNKNOWN = ("-", "-", "-")


@entrypoint
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--asked",
        action="store_true",
        help="show instead what each job asked Slurm for, what it used, and what would have been enough",
    )
    site = read_site()
    if parser.parse_args().asked:
        _show_what_was_asked(site.jobs_dir)
    else:
        print_table(listing.table(site))


def _show_what_was_asked(jobs_dir: Path) -> None:
    sampled = {path.parent for path in jobs_dir.glob(f"*/{samples.FOLDER}")}
    rows = [TITLES]
    # By its length first, so that job 9 comes before job 10.
    for job in sorted(sampled, key=lambda folder: (len(folder.name), folder.name)):
        row = _row(job)
        if row:
            rows.append(row)
    print_table(rows)
    print_line(f"\nof the jobs in {jobs_dir}; enough: the peak and 20 % more, and what a resume may take.")
    print_line("It is unknown (-) for jobs that still run, and for those that failed.")
    print_line("Jobs without samples, or without Slurm, are left out.")


def _row(job: Path) -> tuple[str, ...]:
    """Return the cells of a job; none if it asked Slurm for nothing, or was not sampled."""
    cells = {}
    # There may be no samples, or some that cannot be read.
    with suppress(UserError, OSError):
        for request in requests_of(SampledJob.read(job / samples.FOLDER)):
            unit = request.unit
            enough = "-" if request.enough is None else f"{request.enough}{unit}"
            cells[request.option] = (f"{request.asked:g}{unit}", f"{request.used:.1f}{unit}", enough)
    if not cells:
        return ()
    row = [job.name]
    for option in OPTIONS:
        row += cells.get(option, UNKNOWN)
    return tuple(row)
