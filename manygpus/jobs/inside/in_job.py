"""What a job script asks (slurm/job_env.sh), which itself decides nothing: at its beginning, and at its end.

    python -m manygpus.jobs.inside.in_job begin   prints shell code for its shell (start_plan.py)
    python -m manygpus.jobs.inside.in_job back    prints yes or no: may it go back to the queue?
    python -m manygpus.jobs.inside.in_job end     prints its exit code, then its last lines

outcome_rules.py decides the last two.

Its input is what it has to know: NAME=VALUE, each with a NUL after it, one more NUL, and then the end of what
the ranks and their launcher have printed in this start (jobs/job_log.py). `end` also keeps the outcome
(`job_folder.Outcome`) in the job's folder. It needs no packages.
"""

import os
import shlex
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from manygpus import job_folder
from manygpus.errors import UserError, print_line
from manygpus.job_folder import Script
from manygpus.jobs import job_log, slurm
from manygpus.jobs.inside import failure_reason, outcome_rules, start_plan
from manygpus.jobs.inside.outcome_rules import JobEnd, SlurmFacts
from manygpus.jobs.inside.start_plan import JobStart
from manygpus.jobs.user_program import newest, parse


@dataclass
class Input:
    """What the job script says (`in_job` in slurm/job_env.sh).

    Attributes:
        values: what it says, by name; "" also stands for no, and anything else for yes.
        variables: the variables of its shell: those of Slurm and of the site, exported or not.
        words: the script, and its arguments.
        logs: the end of what is printed.
    """

    values: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    logs: bytes = b""

    @classmethod
    def parse(cls, content: bytes) -> "Input":
        """Read it from the bytes that the job script has written."""
        told, _, logs = content.partition(b"\0\0")
        read = cls(logs=logs)
        for entry in os.fsdecode(told).split("\0"):
            name, _, value = entry.partition("=")
            if name == "word":
                read.words.append(value)
            elif name == "variable":
                variable, _, value = value.partition("=")
                read.variables[variable] = value
            else:
                read.values[name] = value
        return read

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    @property
    def folder(self) -> Path:
        """Return the job's own."""
        return Path(self["folder"])


def main() -> None:
    """Answer what slurm/job_env.sh asks."""
    question = sys.argv[1]
    told = Input.parse(sys.stdin.buffer.read())
    if question == "begin":
        answer = _begin(told)
    elif question == "back":
        facts = SlurmFacts.parse(told["facts"])
        may = outcome_rules.may_go_back(facts, told.folder, _ending(told, facts))
        answer = "yes" if may else "no"
    else:
        answer = _end(told)
    print_line(answer)


def _begin(told: Input) -> str:
    """Return shell code between two lines that are found among the words of a container program."""
    try:
        code = _plan(told)
    except UserError as error:
        code = f"fail {shlex.quote(str(error))}"
    return f"# in_job begins\n{code}\n# in_job ends"


def _plan(told: Input) -> str:
    exported = told["exported"].split()
    set_aside = {
        name: value
        for name, value in told.variables.items()
        if name.startswith(("SLURM_", "SRUN_")) and name not in exported
    }
    program, arguments = parse(told.words) if told["plain"] else (None, [])
    job = JobStart(
        record=told["facts"],
        variables={name: value for name, value in told.variables.items() if name not in set_aside},
        set_aside=set_aside,
        exported=tuple(exported),
        first_node=told["first_node"],
        first_node_record=told["node"],
        addresses=tuple(told["addresses"].split()),
        signal_lines=told["signal"],
        gpu_names=told["gpus"],
        version=told["version"],
        repository=told["repository"],
        folder=told.folder,
        program=program,
        array_of_runs=bool(told["run_name"]),
    )
    if program:
        arguments = program.in_start(job.restarts, arguments, told.folder)
        script = program.described(arguments, python=sys.executable, folder=told.folder)
    elif told.words:
        path, *arguments = told.words
        script = Script(str(Path(path).absolute()), arguments)
    else:
        script = None
    if script:
        script = replace(
            script,
            commit=told["code_version"],
            repository=told["code_top"],
            array_element=slurm.array_element(told["facts"]),
            run_name=told["run_name"],
            job_name=told.variables.get("SLURM_JOB_NAME", ""),
            log=told["log"],
        )
    return start_plan.begin(job, script, _resolve, monitored=told["monitor"] == "on")


def _resolve(name: str) -> str | None:
    """Return the first address of a name, as its processes will find it; None if it has none."""
    try:
        return socket.getaddrinfo(name, None)[0][4][0]
    except (OSError, UnicodeError):
        return None


def _ending(told: Input, facts: SlurmFacts) -> JobEnd:
    restart = int(told["restart"])
    if not told["begun"] and facts.restarts is not None:  # the shell may have another job's number so far
        restart = facts.restarts
    script = job_folder.read_script(told.folder)
    words = script.when_requeued if script else None
    return JobEnd(
        code=int(told["code"]),
        from_outside=bool(told["from_outside"]),
        seconds=int(told["seconds"]),
        restart=restart,
        refusal=told.values.get("refusal"),
        most_restarts=int(told["most_restarts"]),
        begun=bool(told["begun"]),
        failure=told["failure"],
        resumes_unsaved=bool(told["resumes_unsaved"]),
        would_start_anew=words is not None and not newest(words),
    )


def _end(told: Input) -> str:
    facts = SlurmFacts.parse(told["facts"])
    how = _ending(told, facts)
    if not how.begun and not how.restart:
        with suppress(OSError):
            job_folder.set_aside(told.folder)
    logs = job_log.parse(told.logs)
    evidence = failure_reason.Evidence(told.folder, logs, launcher=told["launcher"], log=Path(told["log"]))
    outcome = outcome_rules.end(facts, told.folder, how, evidence)
    if outcome.well and outcome_rules.has_nothing_left_to_do(facts, told.folder, how):
        job_folder.note_end_for_good(told.folder)
    with suppress(OSError):  # a full disk
        job_folder.keep_outcome(told.folder, outcome)
    return "\n".join([f"code    {outcome.exit_code}", *outcome.said])


if __name__ == "__main__":
    main()
