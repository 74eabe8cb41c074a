"""A request for one job: what it runs, what it asks Slurm for, and where its files go."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from manygpus import project
from manygpus.config import options
from manygpus.errors import REPOSITORY
from manygpus.jobs import local_job
from manygpus.jobs.site import DEFAULT_MINUTES, Site
from manygpus.jobs.stages import JOB_ENV, Resources, Stage
from manygpus.jobs.submit.freezing import PlannedCopy
from manygpus.jobs.submit.slurm_options import MEMORY_OPTIONS, option_of, sbatch_options, srun_options

# sbatch obeys these, and submitit knows nothing of them: it would wait, or look for other files.
NOT_FOR_SUBMITIT = ("SBATCH_WAIT", "SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_ARRAY_INX")


@dataclass(frozen=True)
class Request:
    """A request for one job.

    Attributes:
        arguments: options of the stage script.
        folder: a new one (`new_folder`), for submitit's files and the logs.
        minutes: the time limit; it overrides the site's SBATCH_TIMELIMIT.
        partition: the partition's name; it overrides the site's SBATCH_PARTITION.
        passed_on: options of sbatch and their values (`PASSED_ON`); they override the site's.
        why_here: why it runs on this machine, in words; "" if it goes to Slurm.
        spare_nodes: how many nodes it has beside those of its ranks, in place of nodes that fail.
        avoids_slow_nodes: whether its nodes are measured, and it goes back to the queue without slow ones.
        threads: the threads of each process on this machine (`local_job.variables`).
        working_dir: the folder that it starts in; None for the one that it is sent from.
        run_name: the name of its run in a sweep.
        in_job: the number of the job of Slurm that it shares with other runs of a sweep (sweeps/pack.py).
        restart: how often it has started before in that job.
        code: the frozen code that it runs; None for the files as they are when it starts.
        about_code: what is told of that.
    """

    stage: Stage
    resources: Resources
    arguments: tuple[str, ...]
    site: Site
    folder: Path
    minutes: int | None = None
    partition: str | None = None
    passed_on: Mapping[str, str] = field(default_factory=dict)
    why_here: str = ""
    spare_nodes: int = 0
    avoids_slow_nodes: bool = False
    threads: int | None = None
    working_dir: Path | None = None
    run_name: str = ""
    in_job: str = ""
    restart: int = 0
    code: PlannedCopy | None = None
    about_code: tuple[str, ...] = ()

    def with_code(self, code: PlannedCopy) -> "Request":
        """Return the request of a job that runs this frozen code."""
        return replace(
            self,
            stage=code.stage(self.stage),
            arguments=code.arguments(self.arguments),
            code=code,
        )

    @property
    def job_name(self) -> str:
        """Return the name of the job in Slurm."""
        return self.passed_on.get("job-name", self.stage.job_name)

    @property
    def cluster(self) -> str:
        """Return submitit's word for where the job runs."""
        return "local" if self.why_here else "slurm"

    @property
    def timeout_min(self) -> int:
        """Return the time limit in minutes."""
        return self.minutes or self.site.minutes or DEFAULT_MINUTES

    @property
    def sbatch_options(self) -> dict[str, str | bool]:
        """Return how the job asks for GPUs, cores and memory at this site, as {"gpus-per-node": "2", ...}.

        What its user passes on to sbatch comes after these, where it counts.
        """
        nodes = self.resources.nodes + self.spare_nodes
        asked = sbatch_options(self.site, replace(self.resources, nodes=nodes))
        if self.spare_nodes:
            # Slurm would end the job with its first node that fails.
            asked |= {"nodes": str(nodes), "no-kill": True}
        if "mem" in self.passed_on:
            # The site may count it by CPU or GPU, and sbatch takes it in one form only.
            asked = {option: value for option, value in asked.items() if option not in MEMORY_OPTIONS}
        return {**asked, **self.passed_on}

    @property
    def sbatch_variables(self) -> dict[str, str]:
        """Return the SBATCH_* variables, which override a script's lines, so they include the options."""
        variables = dict(self.site.sbatch)
        if self.partition:
            variables["SBATCH_PARTITION"] = self.partition
        if self.minutes:
            variables["SBATCH_TIMELIMIT"] = str(self.minutes)
        for name in NOT_FOR_SUBMITIT:
            variables.pop(name, None)
        return {name: value for name, value in variables.items() if option_of(name) not in self.passed_on}

    @property
    def srun_options(self) -> list[str]:
        """Return the options by which srun ends the ranks together."""
        return srun_options(self.resources.tasks)

    @cached_property
    def options(self) -> options.Options:
        """Return what the arguments mean at this site.

        Raises:
            UserError: as `read_options`.
        """
        arguments = [f"--checkpoint-dir={self.site.jobs_dir}", *self.arguments]
        return read_options(self.stage, arguments, self.site)

    @property
    def results_dir(self) -> Path:
        """Return the folder of the results: that of the arguments, or the site's."""
        return self.options.results_dir.absolute()

    @property
    def records_dir(self) -> Path | None:
        """Return where the job's CSV will be; None for a plain script, most of which write none."""
        return None if self.stage.plain else self.results_dir / "runs"

    @property
    def setup(self) -> list[str]:
        """Return what the job's shell does first: all that is the same in every job (scripts/job_env.sh)."""
        return [*self.environment, f"begin_job {shlex.join([*self.words, *self.arguments])}"]

    @property
    def job_env(self) -> Path:
        """Return what the job script sources."""
        return self.code.job_env if self.code else JOB_ENV

    @property
    def kit(self) -> list[str]:
        """Return the lines that tell where site.sh, .venv and results are, if not around the kit's code."""
        if not project.IS_CHECKOUT:
            return project.assignments()
        return [f"MANYGPUS_CHECKOUT={shlex.quote(str(REPOSITORY))}"] if self.job_env != JOB_ENV else []

    @property
    def words(self) -> list[str]:
        """Return the words by which a job script names what it runs, before its arguments."""
        return self.stage.program.words if self.stage.program else [str(self.stage.script)]

    @property
    def environment(self) -> list[str]:
        """Return the part of `setup` that a job script with a line `choose_training` has, too."""
        source = f"source {shlex.quote(str(self.job_env))}"
        if self.stage.plain:
            source += f" {shlex.join(self.words)}"
        spare = [f"export MANYGPUS_SPARE_NODES={self.spare_nodes}"] if self.spare_nodes else []
        results = f"export MANYGPUS_RESULTS_DIR={shlex.quote(str(self.results_dir))}"
        node_check = ["SITE_NODE_CHECK=avoid"] if self.avoids_slow_nodes else []
        return ["set -euo pipefail", *spare, *self.kit, source, *node_check, results]


def new_folder(site: Site, stage: Stage) -> Path:
    """Return a folder name that no other job has had; the folder is not created."""
    return site.jobs_dir / "submitit" / local_job.new_name(stage.job_name)


def read_options(stage: Stage, arguments: Sequence[str], site: Site) -> options.Options:
    """Parse the options of the stage, with the site's folders; a user's own script may have more.

    The options of a plain script are not parsed: only the site's folders are returned.

    Raises:
        UserError: if an option is unknown or makes no sense.
    """
    words = [f"--data-dir={site.data_dir}", f"--results-dir={site.results_dir}"]
    if not stage.plain:
        words += arguments
    return options.parse_options(stage.label, arguments=words, known_only=stage.is_users_own)
