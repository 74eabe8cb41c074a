"""Make a process the parent of those below it that lose their own, in place of the system's first process.

    python adopt.py COMMAND ...   becomes COMMAND, with that property

Slurm's slurmstepd needs it: without cgroups it finds the processes of a job by their parents, and would miss
those whose parent has ended.
"""

import ctypes
import os
import sys

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h; it outlasts exec, prctl(2)


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if __name__ == "__main__":
    adopt_orphans()
    os.execvp(sys.argv[1], sys.argv[1:])
