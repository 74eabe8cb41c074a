"""A learner's job script, as Slurm would take it."""

import os
import re
from pathlib import Path

from trainkit.jobs import slurm
from trainkit.jobs.site import read_site
from trainkit.workshop.work import Wrong


def requested(text: str) -> dict[str, str]:
    """Return the options with a value in the #SBATCH lines of a script, by their long names."""
    found = {}
    for line in re.findall(r"^#SBATCH\s+([^#\n]*)", text, re.MULTILINE):
        for short, long in {"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus-per-task"}.items():
            line = re.sub(rf"(^|\s)-{short}\s*(?=\w)", rf"\1--{long}=", line)
        found |= dict(re.findall(r"(?<!\S)--([a-z-]+)(?:=|\s+)([^\s-]\S*)", line))
    return found


def ask_slurm(script: Path, stage: Path) -> str:
    """Ask Slurm whether it would take the script, from the folder of the stage; returns a sentence.

    Raises:
        Wrong: if it would not.
    """
    if not slurm.is_here():
        return "(There is no Slurm here to ask: `sbatch --test-only` was not tried.)"
    environment = os.environ | read_site().sbatch
    asked = slurm.ask("sbatch", "--test-only", str(script), cwd=stage, env=environment)
    if asked.returncode:
        told = slurm.sbatch_message(asked.stderr)
        raise Wrong(f"Slurm would not take the job ({told}): {slurm.advice(told)}.")
    return "Slurm was asked, and would take the job."
