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

# To load PyTorch for the first time from a shared file system may take so long.
IMPORT_SECONDS = 180

SHARED_FOLDERS_FIX = "set SITE_RESULTS_DIR and SITE_SCRATCH_DIR in slurm/site.sh to shared folders of yours"

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
from trainkit.doctor import checkup_torch
from trainkit.errors import entrypoint

@entrypoint
def main():
    checkup_torch.look_from_login_node(sys.argv[1], int(sys.argv[2]))

main()
"""


def check_site() -> tuple[Site | None, list[Finding]]:
    """Read slurm/site.sh."""
    try:
        site = read_site()
        # It raises an error for words that are no options.
        sbatch_options(site, resources(STAGES[DDP], 2))
    except UserError as error:
        return None, [Finding("site", FAULT, str(error), "slurm/site.example.sh shows the form")]
    message = "no slurm/site.sh: the defaults apply"
    if (REPOSITORY / "slurm" / "site.sh").exists():
        message = "slurm/site.sh is valid"
    variables = ", ".join(f"{name}={value}" for name, value in sorted(site.sbatch.items()))
    if variables:
        message += f" ({variables})"
    return site, [Finding("site", OK, message), *_check_memory(site)]


def _check_memory(site: Site) -> list[Finding]:
    """Warn of a request for memory that does not reach `sbatch slurm_submit.sh`."""
    scripts = [path.read_text() for path in REPOSITORY.glob("0*/slurm_submit*.sh")]
    if not site.memory_by_part or not any("#SBATCH --mem=" in script for script in scripts):
        return []
    message = f"{site.memory_by_part} counts for submit.py, but not for job scripts: their --mem comes first"
    return [Finding("site", WARNING, message, "delete their lines #SBATCH --mem, or set SBATCH_MEM_PER_NODE")]


def check_slurm() -> list[Finding]:
    """Check that Slurm's programs are installed, and its controller answers."""
    why_not = slurm.why_not_here()
    if why_not:
        fix = "go to the login node, `module load slurm` on some sites; without a cluster: make cluster-up"
        return [Finding("slurm", FAULT, f"there is no Slurm here: {why_not}", fix)]
    ping = slurm.ask("scontrol", "ping")
    # Of several controllers one will do.
    if "UP" not in ping.stdout.replace("/", " ").split():
        message = (ping.stdout or ping.stderr).partition("\n")[0]
        fix = "try again later, or ask your admin; for the practice cluster: make cluster-down cluster-up"
        return [Finding("slurm", FAULT, f"Slurm's controller does not answer ({message})", fix)]
    version = slurm.ask("scontrol", "--version").stdout.strip()
    return [Finding("slurm", OK, f"{version} answers")]


def check_environment(site: Site, in_job_too: bool) -> list[Finding]:
    """Check the job's Python and, read with it, the data; `in_job_too` if a job will check again."""
    # It may work on the compute nodes only, which the job will show.
    level = WARNING if in_job_too else FAULT
    most_gpus = 0 if slurm.cluster() == "practice" else slurm.most_gpus()
    arguments = (str(REPOSITORY), LOOK, str(site.data_dir), str(most_gpus))
    done = slurm.ask("bash", "-c", ENVIRONMENT, "environment", *arguments, seconds=IMPORT_SECONDS)
    if "srun's container" in done.stdout:
        message = "Python and data can be seen only from inside srun's container"
        return [Finding("environment", WARNING, message, "check them with `doctor.py --job`")]
    findings = findings_in(read_messages(done.stdout))
    if not findings:
        # The command's output, and its error.
        problem = "; ".join(done.stderr.strip().splitlines()[-2:]) or f"exit code {done.returncode}"
        message = f"the job's Python does not work here: {problem}"
        fix = "fix activate_environment in slurm/site.sh; for the default, .venv: make .venv/ready"
        return [Finding("environment", level, message, fix)]
    findings = [finding._replace(level=level) if finding.level == FAULT else finding for finding in findings]
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2]
        findings.append(fault_from("data", last_line))
    return findings


def check_folders(site: Site) -> list[Finding]:
    """Check that the folders that jobs write to are writable."""
    logs_dir = STAGES[DDP].script.parent
    faults = []
    for folder, contents, fix in (
        (site.results_dir, "results", SHARED_FOLDERS_FIX),
        (site.jobs_dir, "checkpoints", SHARED_FOLDERS_FIX),
        (logs_dir, "logs", "put this checkout where you may write"),
    ):
        try:
            files.check_writable(folder, contents, fix)
        except UserError as error:
            faults.append(fault_from("folders", str(error)))
    if faults:
        return faults
    folders = f"{site.results_dir}, {site.jobs_dir}, {logs_dir}"
    return [Finding("folders", OK, f"results, checkpoints and logs can be written: {folders}")]
