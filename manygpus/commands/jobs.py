"""Show the jobs of this project: what each one runs, its state, how long, and the verdict or why it failed.

Try: python slurm/jobs.py; python slurm/jobs.py my_project; python slurm/jobs.py 17
Try: python slurm/jobs.py --code 17; python slurm/jobs.py --json 17
"""

from contextlib import suppress
from pathlib import Path

from manygpus import json_document
from manygpus.config.command_line import Parser, add_json
from manygpus.errors import UserError, entrypoint, print_line, print_table
from manygpus.frozen_code import FrozenCode
from manygpus.jobs import job_log
from manygpus.jobs.git_checkout import GitError
from manygpus.jobs.site import Site, read_site
from manygpus.jobs.submit.code_difference import difference, unified_diff
from manygpus.jobs.watch import job_list
from manygpus.log_words import printable
from manygpus.monitor import samples
from manygpus.monitor.resource_use import CORES, MEMORY, ResourceUse, measure_resource_use
from manygpus.monitor.sampled_job import SampledJob

TITLES = ("job", "mem asked", "used", "enough", "cpus-per-task asked", "used", "enough")
# The options of sbatch that a row tells of.
OPTIONS = (MEMORY, CORES)
UNKNOWN = ("-", "-", "-")
LINES_OF_A_LOG = 20
# Of schemas/jobs.json, and of schemas/asked.json.
SCHEMA_VERSION = 1
SCHEMA_VERSION_OF_ASKED = 1


@entrypoint
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--asked",
        action="store_true",
        help="show instead what each job asked Slurm for, what it used, and what would have been enough",
    )
    parser.add_argument(
        "--code",
        action="store_true",
        help="show instead how the code that job JOB runs differs from the files of today",
    )
    parser.add_argument(
        "word",
        nargs="?",
        metavar="JOB or WORD",
        help="show only this job, with the end of its log; or only the jobs with WORD in their name, their "
        "script's path or its arguments",
    )
    add_json(parser, "the jobs, or with --asked what they asked for,")
    options = parser.parse_args()
    if options.code and not options.word:
        parser.error("--code needs the number of a job")
    if options.code and options.json:
        parser.error("--json is not for --code, which prints a diff")
    site = read_site()
    if options.code:
        _show_code(site, options.word)
    elif options.asked:
        _show_what_was_asked(site.jobs_dir, options.json)
    else:
        show(site, options.word, options.json)


def show(site: Site, word: str | None, as_json: bool) -> None:
    """Print the jobs, or those that match `word`; of a job that is named by its number also the log's end.

    An array may have a hundred jobs: its number lists them, without their logs.
    """
    jobs = [job for job in job_list.jobs(site) if word is None or job.matches(word)]
    if word and not jobs:
        raise UserError(f"no job of this project matches {word}: see all with `manygpus jobs`.")
    named = [job for job in jobs if word and job.is_numbered(word)]
    # Runs that share a job have its number in common.
    logged = [job for job in named if job.log and job.number == word]
    end_of_log = {job.log: job_log.last_lines(Path(job.log))[-LINES_OF_A_LOG:] for job in logged}
    if as_json:
        documents = [job.as_json() | {"end_of_log": end_of_log.get(job.log)} for job in named or jobs]
        json_document.print_document({"schema_version": SCHEMA_VERSION, "jobs": documents})
        return
    print_table([job_list.TITLES, *(job.cells() for job in named or jobs)])
    for job in logged:
        print_line("\n".join(["", f"the end of {job.log}:", *end_of_log[job.log]]))


def _show_code(site: Site, number: str) -> None:
    """Print how the frozen code of a job, or of all jobs of an array, differs from its checkout of today.

    Raises:
        UserError: if there is no such job, or no copy of its code.
    """
    jobs = [job for job in job_list.jobs(site) if job.is_numbered(number)]
    if not jobs:
        raise UserError(f"no job of this project has the number {number}: see all with `manygpus jobs`.")
    if not jobs[0].frozen_in:
        raise UserError(f"job {number} runs no copy of its code: its log, or `git log`, names the commit.")
    code = FrozenCode.read(Path(jobs[0].frozen_in).parent)
    if code is None:
        raise UserError(f"the code of job {number} is not in {jobs[0].frozen_in} any more.")
    try:
        changes = difference(code)
    except (GitError, OSError) as error:
        raise UserError(f"{code.checkout} cannot be compared with {code.folder} ({error}).") from None
    print_line(f"{code.commit_in_words} in {code.checkout}, frozen in {code.folder} at {code.made_at}")
    for name in changes.changed:
        print_line("\n".join(["", *unified_diff(code, name)]))
    for title, names in (("deleted since:", changes.deleted), ("new since:", changes.new)):
        if names:
            print_line("\n".join(["", title, *map(printable, names)]))
    if not changes.names:
        print_line("the files of today are the same")


def _show_what_was_asked(jobs_dir: Path, as_json: bool) -> None:
    asked_by_job = _what_was_asked(jobs_dir)
    if as_json:
        documents = [
            {"job": number, "asked": [resource.as_json() for resource in resources]}
            for number, resources in asked_by_job.items()
        ]
        document = {"schema_version": SCHEMA_VERSION_OF_ASKED, "jobs": documents}
        json_document.print_document(document)
        return
    print_table([TITLES, *(_row(number, resources) for number, resources in asked_by_job.items())])
    print_line(f"\nof the jobs in {jobs_dir}; enough: the peak and 20 % more, and what a resume may take.")
    print_line("It is unknown (-) for jobs that still run, and for those that failed.")
    print_line("Jobs without samples, or without Slurm, are left out.")


def _what_was_asked(jobs_dir: Path) -> dict[str, list[ResourceUse]]:
    """Return what each job asked Slurm for, without jobs that asked for nothing, or were not sampled."""
    sampled = {path.parent for path in jobs_dir.glob(f"*/{samples.FOLDER}")}
    asked_by_job = {}
    # By its length first, so that job 9 comes before job 10.
    for job in sorted(sampled, key=lambda folder: (len(folder.name), folder.name)):
        # There may be no samples, or some that cannot be read.
        with suppress(UserError, OSError):
            resources = measure_resource_use(SampledJob.read(job / samples.FOLDER))
            if resources:
                asked_by_job[job.name] = resources
    return asked_by_job


def _row(number: str, resources: list[ResourceUse]) -> tuple[str, ...]:
    """Return the cells of a job."""
    cells = {}
    for resource in resources:
        unit = resource.unit
        enough = "-" if resource.enough is None else f"{resource.enough}{unit}"
        cells[resource.option] = (f"{resource.asked:g}{unit}", f"{resource.used:.1f}{unit}", enough)
    row = [number]
    for option in OPTIONS:
        row += cells.get(option, UNKNOWN)
    return tuple(row)
