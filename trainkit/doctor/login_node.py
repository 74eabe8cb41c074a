"""The doctor's checks on the login node: the site file, Slurm, the job's environment, data and folders.

It needs only the standard library.
"""

from trainkit import files
from trainkit.doctor.checkup import FAULT, OK, WARNING, Finding, fault_from, findings_in, read_messages
from trainkit.errors import UserError
from trainkit.jobs import slurm
from trainkit.jobs.sbatch_options import sbatch_options
from trainkit.jobs.site import Site, read_site
from trainkit.jobs.stages import REPOSITORY, STAGES, resources
from trainkit.record.columns import DDP

IMPORT_SECONDS = 180

# The shell of a job, up to the job's Python, which runs its checks, and reads the data as a job would.
ENVIRONMENT = """
set -euo pipefail
source "$1/slurm/site_env.sh"; shift
if [[ ${SITE_SRUN_ARGS[*]-} == *--container* ]]; then echo "srun's container"; exit; fi
run_activate_environment
exec "${SITE_CONTAINER[@]}" python -c "$@"
"""
LOOK = """
import sys
from trainkit import errors
from trainkit.doctor import checkup_torch
errors.run(lambda: checkup_torch.look_from_login_node(sys.argv[1], int(sys.argv[2])))
"""


def check_site() -> tuple[Site | None, list[Finding]]:
    """Read slurm/site.sh."""
    try:
        site = read_site()
        sbatch_options(site, resources(STAGES[DDP], 2))  # which raises for words that are none
    except UserError as error:
        return None, [Finding("site", FAULT, str(error), "slurm/site.example.sh shows the form")]
    variables = ", ".join(f"{name}={value}" for name, value in sorted(site.sbatch.items()))
    file = REPOSITORY / "slurm" / "site.sh"
    what = "slurm/site.sh is valid" if file.exists() else "no slurm/site.sh: the defaults apply"
    found = Finding("site", OK, f"{what}{f' ({variables})' if variables else ''}")
    return site, [found, *_check_memory(site)]


def _check_memory(site: Site) -> list[Finding]:
    """Warn of a request for memory that does not reach `sbatch slurm_submit.sh`."""
    asked = [script.read_text() for script in REPOSITORY.glob("0*/slurm_submit*.sh")]
    if not site.memory_by_part or not any("#SBATCH --mem=" in script for script in asked):
        return []
    message = f"{site.memory_by_part} counts for submit.py, but not for job scripts: their --mem comes first"
    return [Finding("site", WARNING, message, "delete their lines #SBATCH --mem, or set SBATCH_MEM_PER_NODE")]


def check_slurm() -> list[Finding]:
    """Check that Slurm's programs are installed, and its controller answers."""
    if why := slurm.why_not_here():
        fix = "go to the login node, `module load slurm` on some sites; without a cluster: make cluster-up"
        return [Finding("slurm", FAULT, f"there is no Slurm here: {why}", fix)]
    ping = slurm.ask("scontrol", "ping")
    if "UP" not in ping.stdout.replace("/", " ").split():  # of several controllers one will do
        why = (ping.stdout or ping.stderr).partition("\n")[0]
        fix = "try again later, or ask your admin; for the practice cluster: make cluster-down cluster-up"
        return [Finding("slurm", FAULT, f"Slurm's controller does not answer ({why})", fix)]
    return [Finding("slurm", OK, f"{slurm.ask('scontrol', '--version').stdout.strip()} answers")]


def check_environment(site: Site, in_job_too: bool) -> list[Finding]:
    """Check the job's Python and, read with it, the data; `in_job_too` if a job will check again."""
    # It may work on the compute nodes only, which the job will show.
    level = WARNING if in_job_too else FAULT
    most_gpus = 0 if slurm.cluster() == "practice" else slurm.most_gpus()
    words = (str(REPOSITORY), LOOK, str(site.data_dir), str(most_gpus))
    done = slurm.ask("bash", "-c", ENVIRONMENT, "environment", *words, seconds=IMPORT_SECONDS)
    if "srun's container" in done.stdout:
        message = "Python and data can be seen only from inside srun's container"
        return [Finding("environment", WARNING, message, "check them with `doctor.py --job`")]
    found = findings_in(read_messages(done.stdout))
    if not found:
        # The command's output, and its error.
        problem = "; ".join(done.stderr.strip().splitlines()[-2:]) or f"exit code {done.returncode}"
        message = f"the job's Python does not work here: {problem}"
        fix = "fix activate_environment in slurm/site.sh; for the default, .venv: make .venv/ready"
        return [Finding("environment", level, message, fix)]
    found = [finding._replace(level=level) if finding.level == FAULT else finding for finding in found]
    if done.returncode:
        found.append(fault_from("data", done.stderr.strip().rpartition("\n")[2]))
    return found


def check_folders(site: Site) -> list[Finding]:
    """Check that the folders that jobs write to are writable."""
    own = "set SITE_RESULTS_DIR and SITE_SCRATCH_DIR in slurm/site.sh to shared folders of yours"
    folders = {
        site.results_dir: ("results", own),
        site.jobs_dir: ("checkpoints", own),
        STAGES[DDP].script.parent: ("logs", "put this checkout where you may write"),
    }
    found = []
    for folder, (what, fix) in folders.items():
        try:
            files.check_writable(folder, what, fix)
        except UserError as error:
            found.append(fault_from("folders", str(error)))
    message = f"results, checkpoints and logs can be written: {', '.join(map(str, folders))}"
    return found or [Finding("folders", OK, message)]
