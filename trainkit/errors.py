"""One clear sentence instead of a traceback for every mistake a user can mend."""

import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake the user can mend; its text says what is wrong and what to do."""


def run(main: Callable[[], int | None]) -> None:
    """Call `main` and leave the process, with its return value as the exit code.

    A `UserError` prints its sentence on stderr and exits with 1. Ctrl-C exits with 130.
    """
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error{_which_rank()}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        if type(error).__name__ == "OutOfMemoryError":
            sys.exit(f"error{_which_rank()}: the GPU's memory is full: lower --batch-size.")
        # A rank that stops takes its peers down in whatever they were waiting for. Only the first
        # to stop knows why, so the others point there instead of adding a traceback each.
        if not _lost_a_peer(error):
            raise
        sys.exit(
            f"error{_which_rank()}: lost the other ranks ({first_line(error)}). If one of them reported "
            "an error above, that is the reason."
        )


def first_line(error: Exception) -> str:
    """The first line of its text, without the stack of C++ frames that PyTorch adds."""
    return str(error).strip().partition("\n")[0]


def _which_rank() -> str:
    """Every rank tells its own error: a launcher may kill rank 0 before it could speak for all."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
    return f" on rank {rank}" if rank else ""


def _lost_a_peer(error: RuntimeError) -> bool:
    kinds = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
    return type(error).__name__ in kinds or "gloo" in str(error)
