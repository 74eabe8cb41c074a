"""List the jobs' folders (in results/jobs, or SITE_SCRATCH_DIR), and remove those not needed.

    python slurm/jobs.py                         the jobs: when, size, state, and checkpoints to go on from
    python slurm/jobs.py --remove                remove those that have ended, but no checkpoint to go on from
    python slurm/jobs.py --remove --unfinished   those, too
    python slurm/jobs.py --used                  what each asked Slurm for, used, and needs

What runs or waits stays, and so does everything whose state is not known. CSVs are elsewhere, and stay.
"""

from contextlib import suppress

from trainkit.jobs import housekeeping
from trainkit.jobs.site import read_site
from trainkit.runtime import errors
from trainkit.runtime.command_line import Parser
from trainkit.runtime.errors import UserError, tell
from trainkit.schema import samples


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--remove", action="store_true", help="remove the folders of jobs that have ended")
    parser.add_argument(
        "--unfinished", action="store_true", help="with --remove: also checkpoints to go on from"
    )
    parser.add_argument("--used", action="store_true", help="show memory and cores: asked for, used, enough")
    options = parser.parse_args()
    if options.used and options.remove:
        raise UserError("--used shows jobs and --remove removes them: give one of them.")
    if options.unfinished and not options.remove:
        raise UserError("--unfinished says what --remove removes: give both, or none.")
    jobs_dir = read_site().jobs_dir
    folders = housekeeping.look(jobs_dir)
    old = [folder for folder in folders if folder.ended and (options.unfinished or not folder.newest)]
    if options.used:
        _print_table(_used(folders))
        tell("\nenough: the peak and 20 % more. Jobs without samples, or without Slurm, are left out.")
        return 0
    if not options.remove:
        _print_table([("job", "last change", "size", "state", ""), *(one.row(jobs_dir) for one in folders)])
        tell(f"\n{len(folders)} folders in {jobs_dir}; --remove removes {len(old)}")
        return 0
    problems = 0
    for folder in old:
        name, _, size, state, _ = folder.row(jobs_dir)
        problem = housekeeping.remove(folder)
        problems += problem is not None
        tell(f"{name} ({state}, {size}) {f'cannot be removed: {problem}' if problem else 'removed'}")
    tell(f"{len(old) - problems} removed, {len(folders) - len(old) + problems} stay")
    return 1 if problems else 0


def _used(folders: list[housekeeping.JobFolder]) -> list[tuple[str, ...]]:
    """Return a row for each job that asked Slurm for something and was sampled, and a header."""
    from trainkit.monitor.sampled_job import CORES, SampledJob

    rows = [("job", "mem asked", "used", "enough", "cpus-per-task asked", "used", "enough")]
    for folder in folders:
        with suppress(UserError):  # no samples
            needs = SampledJob(folder.path / samples.FOLDER).needs()
            cells = {
                n.option: (f"{n.asked:g}{n.unit}", f"{n.used:.1f}{n.unit}", f"{n.enough}{n.unit}")
                for n in needs
            }
            if cells:
                mem, cores = (cells.get(option, ("-",) * 3) for option in ("--mem", CORES))
                rows.append((folder.path.name, *mem, *cores))
    return rows


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        tell("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    errors.run(main)
