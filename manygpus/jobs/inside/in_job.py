"""What a job script asks (job_env.sh), which itself decides nothing: at its beginning, and at its end.

    python -m manygpus.jobs.inside.in_job begin   prints shell code for its shell (start_plan.py)
    python -m manygpus.jobs.inside.in_job nodes   prints shell code: are its nodes sick? (slow_nodes.py)
    python -m manygpus.jobs.inside.in_job back    prints yes or no: may it go back to the queue?
    python -m manygpus.jobs.inside.in_job end     prints its exit code, and, if it starts again in its
                                                  nodes, with which MANYGPUS_RESTARTS_IN_JOB; then its last
                                                  lines

outcome_rules.py decides the last two.

Its input is what it has to know: NAME=VALUE, each with a NUL after it, one more NUL, and then the end of what
the ranks and their launcher have printed in this start (jobs/job_log.py). `end` also keeps the outcome
(`job_folder.Outcome`) in the job's folder. It needs no packages.
"""

import os
import shlex
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from manygpus import frozen_code, job_folder, project
from manygpus.errors import UserError, print_line
from manygpus.job_folder import Script
from manygpus.jobs import job_log, slurm
from manygpus.jobs.inside import failure_reason, outcome_rules, resume_point, slow_nodes, start_plan
from manygpus.jobs.inside.outcome_rules import JobEnd, SlurmFacts
from manygpus.jobs.inside.start_plan import JobStart
from manygpus.jobs.user_program import newest, parse, python_of_job

EXIT_CODE_FOLLOWS = "# in_job exit code "


@dataclass
class Input:
    """What the job script says (`in_job` in scripts/job_env.sh).

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
        entries, _, logs = content.partition(b"\0\0")
        read = cls(logs=logs)
        for entry in os.fsdecode(entries).split("\0"):
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
    """Answer what scripts/job_env.sh asks."""
    question = sys.argv[1]
    job_input = Input.parse(sys.stdin.buffer.read())
    if question == "begin":
        answer = _shell_code(_plan, job_input)
    elif question == "nodes":
        answer = _shell_code(_nodes, job_input)
    elif question == "back":
        slurm_facts = SlurmFacts.parse(job_input["facts"])
        may = outcome_rules.may_go_back(slurm_facts, job_input.folder, _job_end(job_input, slurm_facts))
        answer = "yes" if may else "no"
    else:
        answer = _end(job_input)
    print_line(answer)


def _shell_code(decide: Callable[[Input], str], job_input: Input) -> str:
    """Return shell code between two lines that are found among the words of a container program."""
    try:
        code = decide(job_input)
    except UserError as error:
        code = f"fail {shlex.quote(str(error))}"
    return f"# in_job begins\n{code}\n# in_job ends"


def _plan(job_input: Input) -> str:
    exported = job_input["exported"].split()
    set_aside = {
        name: value
        for name, value in job_input.variables.items()
        if name.startswith(("SLURM_", "SRUN_")) and name not in exported
    }
    program, arguments = parse(job_input.words) if job_input["plain"] else (None, [])
    job = JobStart(
        record=job_input["facts"],
        variables={name: value for name, value in job_input.variables.items() if name not in set_aside},
        set_aside=set_aside,
        exported=tuple(exported),
        first_node=job_input["first_node"],
        first_node_record=job_input["node"],
        addresses=tuple(job_input["addresses"].split()),
        signal_lines=job_input["signal"],
        gpu_names=job_input["gpus"],
        version=project.version() or job_input["version"],
        repository=job_input["repository"],
        folder=job_input.folder,
        program=program,
        restarts_in_job=job_folder.restarts_in_job(),
        array_of_runs=bool(job_input["run_name"]),
    )
    if program:
        arguments = program.in_start(job.earlier_starts, arguments, job_input.folder)
        script = program.described(arguments, python=python_of_job(), folder=job_input.folder)
    elif job_input.words:
        path, *arguments = job_input.words
        script = Script(str(Path(path).absolute()), arguments)
    else:
        script = None
    if script:
        code = frozen_code.of(program.user_folder if program else Path(script.path))
        script = replace(
            script,
            commit=job_input["code_version"],
            repository=job_input["code_top"],
            array_element=slurm.array_element(job_input["facts"]),
            run_name=job_input["run_name"],
            job_name=job_input.variables.get("SLURM_JOB_NAME", ""),
            log=job_input["log"],
        )
        if code:
            script = script.with_code(code)
    return start_plan.begin(job, script, _resolve, monitored=job_input["monitor"] == "on")


def _nodes(job_input: Input) -> str:
    measurements = slow_nodes.Measurements.parse(job_input["measured"])
    findings = slow_nodes.judge(job_input["nodes"].split(), measurements, int(job_input["check_seconds"]))
    code = start_plan.print_in_shell(findings.log_lines)
    if findings.slow:
        job_folder.note_slow_nodes(job_input.folder, findings.log_lines[1:])
        if job_input["node_check"] == "avoid":
            code += f"\n{_avoid(job_input, findings)}"
    return code


def _avoid(job_input: Input, findings: slow_nodes.Findings) -> str:
    """Return shell code for a job that is to do without its slow nodes, or says why it cannot."""
    obstacle = ""
    if int(job_input["restart"]) >= int(job_input["most_restarts"]):
        obstacle = "it has come back as often as it may here (SITE_MOST_RESTARTS)"
    elif job_folder.has_avoided(job_input.folder, findings.slow):
        obstacle = "Slurm has started it with them again"
    if obstacle:
        return start_plan.print_in_shell([slow_nodes.trains_with_them(obstacle)])
    return slow_nodes.avoid(findings, slurm.fields(job_input["facts"])).as_shell()


def _resolve(name: str) -> str | None:
    """Return the first address of a name, as its processes will find it; None if it has none."""
    try:
        return socket.getaddrinfo(name, None)[0][4][0]
    except (OSError, UnicodeError):
        return None


def _job_end(job_input: Input, slurm_facts: SlurmFacts) -> JobEnd:
    restart = int(job_input["restart"])
    # The shell may have another job's number so far.
    if not job_input["begun"] and slurm_facts.restarts is not None:
        restart = slurm_facts.restarts
    script = job_folder.read_script(job_input.folder)
    words = script.when_requeued if script else None
    return JobEnd(
        code=int(job_input["code"]),
        from_outside=bool(job_input["from_outside"]),
        seconds=int(job_input["seconds"]),
        restart=restart,
        refusal=job_input.values.get("refusal"),
        most_restarts=int(job_input["most_restarts"]),
        begun=bool(job_input["begun"]),
        failure=job_input["failure"],
        resumes_unsaved=bool(job_input["resumes_unsaved"]),
        would_start_anew=words is not None and not newest(words),
        restarts_in_job=job_folder.restarts_in_job(),
        most_restarts_in_job=int(job_input["most_restarts_in_job"]),
        resume_point=resume_point.find(job_input.folder) if job_input["begun"] else None,
        nodes=int(job_input["nodes"]),
    )


def _end(job_input: Input) -> str:
    slurm_facts = SlurmFacts.parse(job_input["facts"])
    job_end = _job_end(job_input, slurm_facts)
    if not (job_end.begun or job_end.restart or job_end.restarts_in_job):
        with suppress(OSError):
            job_folder.set_aside(job_input.folder)
    logs = job_log.parse(job_input.logs)
    evidence = failure_reason.Evidence(
        job_input.folder, logs, launcher=job_input["launcher"], log=Path(job_input["log"])
    )
    outcome = outcome_rules.end(slurm_facts, job_input.folder, job_end, evidence)
    if outcome.well and outcome_rules.has_nothing_left_to_do(slurm_facts, job_input.folder, job_end):
        job_folder.note_end_for_good(job_input.folder)
    with suppress(OSError):  # a full disk
        job_folder.keep_outcome(job_input.folder, outcome)
    first_line = f"{EXIT_CODE_FOLLOWS}{outcome.exit_code}"
    if outcome.starts_again:
        first_line += f" {job_input['job']}:{job_folder.restarts_in_job() + 1}"
    return "\n".join([first_line, *outcome.said])


if __name__ == "__main__":
    main()
