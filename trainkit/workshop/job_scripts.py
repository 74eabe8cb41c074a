"""A learner's job script, as Slurm would take it."""

import os
import re
from pathlib import Path

from trainkit.jobs import slurm
from trainkit.jobs.site import read_site
from trainkit.workshop.work import Wrong


def requested(text: str) -> dict[str, str]:
    """The options in the #SBATCH lines of a script, by their long names."""
    return dict(re.findall(r"^#SBATCH\s+--([a-z-]+)[= ]\s*(\S+)", text, re.MULTILINE))


def ask_slurm(script: Path, stage: Path) -> str:
    """Whether Slurm would take it, submitted from the folder of the stage; in a sentence.

    Raises:
        Wrong: if it would not.
    """
    if not slurm.is_here():
        return "(There is no Slurm here to ask: `sbatch --test-only` was not tried.)"
    environment = os.environ | read_site().sbatch
    asked = slurm.ask("sbatch", "--test-only", str(script), cwd=stage, env=environment)
    if asked.returncode:
        told = slurm.told_by_sbatch(asked.stderr)
        raise Wrong(f"Slurm would not take the job ({told}): {slurm.advice(told)}.")
    return "Slurm was asked, and would take the job."
