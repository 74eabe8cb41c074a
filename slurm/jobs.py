"""List what the folder of all jobs holds (results/jobs, or SITE_SCRATCH_DIR), and remove what is not needed.

    python slurm/jobs.py                         the jobs: when, size, state, and checkpoints to go on from
    python slurm/jobs.py --remove                remove those that have ended, but no checkpoint to go on from
    python slurm/jobs.py --remove --unfinished   those, too

What runs or waits stays, and so does everything whose state is not known. CSVs are elsewhere, and stay.
"""

from trainkit.jobs import housekeeping, slurm
from trainkit.jobs.site import read_site
from trainkit.runtime import errors
from trainkit.runtime.command_line import Parser
from trainkit.runtime.errors import UserError


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--remove", action="store_true", help="remove the folders of jobs that have ended")
    parser.add_argument(
        "--unfinished", action="store_true", help="with --remove: also checkpoints to go on from"
    )
    options = parser.parse_args()
    if options.unfinished and not options.remove:
        raise UserError("--unfinished says what --remove removes: give both, or none.")
    jobs_dir = read_site().jobs_dir
    folders = housekeeping.look(jobs_dir)
    old = [folder for folder in folders if folder.ended and (options.unfinished or not folder.newest)]
    if not options.remove:
        rows = [("job", "last change", "size", "state", ""), *(folder.row(jobs_dir) for folder in folders)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        print(f"\n{len(folders)} folders in {slurm.printable(str(jobs_dir))}; --remove removes {len(old)}")
        return 0
    problems = 0
    for folder in old:
        name, _, size, state, _ = folder.row(jobs_dir)
        problem = housekeeping.remove(folder)
        problems += problem is not None
        print(f"{name} ({state}, {size}) {f'cannot be removed: {problem}' if problem else 'removed'}")
    print(f"{len(old) - problems} removed, {len(folders) - len(old) + problems} stay")
    return 1 if problems else 0


if __name__ == "__main__":
    errors.run(main)
