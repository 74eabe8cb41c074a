"""What a job script asks (slurm/job_env.sh), which itself decides nothing: at its beginning, and at its end.

    python -m trainkit.jobs.in_job begin ...   prints shell code for its shell (beginning.py)
    python -m trainkit.jobs.in_job script ...  prints what it runs, and keeps it in the job's folder
    python -m trainkit.jobs.in_job back ...    prints yes or no: may it go back to the queue? (ending.py)
    python -m trainkit.jobs.in_job end ...     prints its exit code, then its last lines (ending.py)

The end of what the ranks and their launcher have printed in this start is the input (job_log.py). `end` also
keeps the outcome in the job's folder (`job_folder.Outcome`). It needs no packages.
"""

import argparse
import os
import shlex
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainkit import job_folder
from trainkit.errors import UserError, print_line
from trainkit.job_folder import Script
from trainkit.jobs import beginning, ending, job_log, slurm, why
from trainkit.jobs.beginning import Beginning
from trainkit.jobs.ending import Ending, SlurmFacts
from trainkit.jobs.program import newest, parse

SCRIPT_FOLLOWS = "# in_job script"


def main() -> None:
    """Answer what slurm/job_env.sh asks."""
    # What follows -- is of the user, and none of these options.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = _parse(sys.argv[1:end])
    words = sys.argv[end + 1 :]
    if options.question == "begin":
        answer = _begin(options, words)
    elif options.question == "script":
        answer = _script(options, words)
    elif options.question == "back":
        facts = SlurmFacts.parse(options.facts)
        may = ending.may_go_back(facts, options.folder, _ending(options, facts))
        answer = "yes" if may else "no"
    else:
        answer = _end(options)
    print_line(answer)


def _begin(options: argparse.Namespace, words: list[str]) -> str:
    """Return shell code between two lines that are found among the words of a container program."""
    try:
        code = _plan(options, words)
    except UserError as error:
        code = f"fail {shlex.quote(str(error))}"
    return f"# in_job begins\n{code}\n# in_job ends"


def _plan(options: argparse.Namespace, words: list[str]) -> str:
    exported, not_exported = beginning.parse_declarations(options.variables)
    set_aside = {name: value for name, value in not_exported.items() if name.startswith(("SLURM_", "SRUN_"))}
    others = {name: value for name, value in not_exported.items() if name not in set_aside}
    job = Beginning(
        record=options.facts,
        variables={**exported, **others},
        set_aside=set_aside,
        exported=tuple(options.exported.split()),
        first_node=options.first_node,
        first_node_record=options.node,
        addresses=tuple(options.addresses.split()),
        signal_lines=options.signal,
        gpu_names=options.gpus,
        version=options.version,
        repository=options.repository,
        folder=options.folder,
        program=parse(words)[0] if options.plain else None,
        array_of_runs=options.array_of_runs,
    )
    return beginning.begin(job, _resolve, monitored=options.monitor == "on")


def _script(options: argparse.Namespace, words: list[str]) -> str:
    """Return the lines of the log on what the job runs, after a line that is found among other words."""
    lines = []
    if options.plain:
        program, arguments = parse(words)
        arguments = program.in_start(job_folder.restarts(), arguments, options.folder)
        script = program.described(arguments, python=sys.executable, folder=options.folder)
        if job_folder.restarts() and script.when_requeued and not newest(script.when_requeued):
            lines.append("nothing is there so far that --when-requeued names: it starts anew")
    else:
        path, *arguments = words
        script = Script(path, arguments)
    script = replace(
        script,
        commit=options.version,
        repository=options.top_folder,
        array_element=slurm.array_element(options.facts),
        run_name=options.run_name,
        job_name=os.environ.get("SLURM_JOB_NAME", ""),
        log=options.log,
    )
    with suppress(OSError):  # a full disk
        job_folder.keep_script(options.folder, script)
    lines += beginning.script_lines(script, kit=options.repository)
    return "\n".join([SCRIPT_FOLLOWS, *lines])


def _resolve(name: str) -> str | None:
    """Return the first address of a name, as its processes will find it; None if it has none."""
    try:
        return socket.getaddrinfo(name, None)[0][4][0]
    except (OSError, UnicodeError):
        return None


def _ending(options: argparse.Namespace, facts: SlurmFacts) -> Ending:
    restart = options.restart
    if not options.begun and facts.restarts is not None:  # the shell may have another job's number so far
        restart = facts.restarts
    script = job_folder.read_script(options.folder)
    words = script.when_requeued if script else None
    return Ending(
        code=options.code,
        from_outside=options.from_outside,
        seconds=options.seconds,
        restart=restart,
        refusal=options.refusal,
        most_restarts=options.most_restarts,
        begun=options.begun,
        failure=options.failure,
        resumes_unsaved=options.resumes_unsaved,
        would_start_anew=words is not None and not newest(words),
    )


def _end(options: argparse.Namespace) -> str:
    facts = SlurmFacts.parse(options.facts)
    how = _ending(options, facts)
    if not how.begun and not how.restart:
        with suppress(OSError):
            job_folder.set_aside(options.folder)
    logs = job_log.parse(sys.stdin.buffer.read())
    evidence = why.Evidence(options.folder, logs, launcher=options.launcher, log=options.log)
    outcome = ending.end(facts, options.folder, how, evidence)
    if outcome.well and ending.has_nothing_left_to_do(facts, options.folder, how):
        job_folder.note_end_for_good(options.folder)
    with suppress(OSError):  # a full disk
        job_folder.keep_outcome(options.folder, outcome)
    return "\n".join([f"code    {outcome.exit_code}", *outcome.said])


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    questions = parser.add_subparsers(dest="question", required=True)
    begin = questions.add_parser("begin")
    add = begin.add_argument
    add("--variables", required=True, help="by `declare -p`: those of Slurm and of the site")
    add("--exported", required=True, help="the names of all that are exported")
    add("--first-node", required=True, help="its name in Slurm")
    add("--node", required=True, help="what Slurm says of it")
    add("--addresses", required=True, help="of this node")
    add("--signal", required=True, help="the lines #SBATCH --signal of the job script")
    add("--gpus", required=True, help="the names of this node's, one in a line")
    add("--version", required=True, help="of the code, by git")
    add("--repository", required=True, help="this checkout")
    add("--monitor", choices=("on", "off"), required=True, help="SITE_MONITOR")
    add("--array-of-runs", action="store_true", help="each job of its array has arguments of its own")
    script = questions.add_parser("script")
    add = script.add_argument
    add("--version", required=True, help="of the code of the script, by git")
    add("--run-name", default="", help="of its run in a sweep")
    add("--log", required=True, help="the job's own")
    add("--top-folder", required=True, help="of the git repository that it is in")
    add("--repository", required=True, help="this checkout")
    back = questions.add_parser("back")
    end = questions.add_parser("end")
    end.add_argument(
        "--refusal", help="why Slurm has refused to put it back into the queue; empty if it did not refuse"
    )
    back.set_defaults(refusal=None)
    for question in (back, end):
        add = question.add_argument
        add("--log", type=Path, required=True, help="the job's")
        add("--launcher", choices=("srun", "torchrun"), required=True)
        add("--code", type=int, required=True, help="the job script's exit code")
        add("--seconds", type=int, required=True, help="since its start")
        add("--restart", type=int, required=True, help="which start this is, from 0 on")
        add("--most-restarts", type=int, required=True, help="SITE_MOST_RESTARTS")
        add("--begun", action="store_true", help="`begin` has answered")
        add("--from-outside", action="store_true", help="it was sent SIGTERM or SIGHUP")
        add("--resumes-unsaved", action="store_true", help="its script has words for a start after the first")
        add("--failure", required=True, help="the error by which the job script has ended; empty if by none")
    for question in (begin, script):
        help_text = "its script does not use the kit; behind -- are the words that name it (program.py)"
        question.add_argument("--plain", action="store_true", help=help_text)
    for question in (begin, script, back, end):
        add = question.add_argument
        add("--facts", required=True, help="what Slurm says of the job, or nothing")
        add("--folder", type=Path, required=True, help="the job's own")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
