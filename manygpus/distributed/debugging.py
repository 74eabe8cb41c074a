"""--debug: each rank writes to its own file how it connects, and where it is when it hangs."""

import faulthandler
import os
import pickle
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from manygpus.devices import device_name
from manygpus.errors import print_line
from manygpus.files import explained, replacing
from manygpus.launchers import node

# The beginnings of the variables that decide who a rank is, and how it connects.
LOGGED_VARIABLES = re.compile(
    r"NCCL|GLOO|TORCH|CUDA|HIP|ROCR|OMP|OMPI_COMM|PMI|MPI_LOCAL|MASTER|((LOCAL|GROUP)_)?(RANK|WORLD_SIZE)|"
    r"SLURM_(JOB_|STEP_|PROCID|LOCALID|NODE|GPUS_ON)"
)
# Returns gloo's last collectives, pickled; None in older PyTorch.
dump_flight_record = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
# That PyTorch waits for NCCL's dump, by default as well. Without --debug there is none (devices.py).
SECONDS_FOR_DUMP = 15
# How many of NCCL's last collectives an older PyTorch is to keep.
KEPT_COLLECTIVES = 2_000


def begin(folder: Path, rank: int, ranks: int, every: float) -> None:
    """Have NCCL, PyTorch and Python log what they do, from before the ranks meet.

    `debug-rank-N.txt` gets, after the lines of an earlier start of the job, the variables that decide how the
    ranks connect and, `every` so many seconds, the stack of every thread; `debug-rank-N-nccl-PID.txt` gets
    NCCL's log; `flight-of-RANKS/rank-N` the last collectives, with NCCL only after a timeout. PyTorch's own
    errors become more precise: see TORCH_DISTRIBUTED_DEBUG in its manual.

    Raises:
        UserError: if the folder cannot be written to.
    """
    path = folder / f"debug-rank-{rank}.txt"
    record = folder / f"flight-of-{ranks}" / f"rank-{rank}"
    settings = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": str(path.with_name(f"{path.stem}-nccl-%p.txt")),
        "TORCH_DISTRIBUTED_DEBUG": "INFO",  # with DETAIL, DDP crashes on gloo (PyTorch 2.14)
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(SECONDS_FOR_DUMP * 1000),
        "TORCH_FR_DUMP_TEMP_FILE": f"{record.parent}/rank-",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{record.parent}/rank-",  # its name in an older PyTorch
    }
    if dump_flight_record is None:
        settings["TORCH_NCCL_TRACE_BUFFER_SIZE"] = str(KEPT_COLLECTIVES)
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    dist.set_debug_level_from_env()
    fix = "free the space, fix the permissions, or give a different --results-dir."
    with explained(f"--debug cannot write to {folder}", fix):
        record.parent.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)  # of an earlier run
        file = path.open("a", encoding="utf-8")  # never closed: faulthandler writes to it until the end
        file.write(f"\nstarted {time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}\n")
        logged = [name for name in sorted(os.environ) if LOGGED_VARIABLES.match(name)]
        file.writelines(f"{name}={os.environ[name]}\n" for name in logged)
        file.write(f"Where this rank is, every {every:g} s:\n")
        file.flush()
    faulthandler.enable(file)  # also if NCCL aborts it
    threading.Thread(target=_write_stacks, args=(file, record, every), daemon=True).start()


def _write_stacks(file: TextIO, path: Path, every: float) -> None:
    """Write all stacks to `file`, and gloo's collectives to `path`, again and again."""
    while True:
        time.sleep(every)
        # Not by dump_traceback_later, which can crash a busy one (github.com/python/cpython/issues/131580).
        faulthandler.dump_traceback(file)
        if dump_flight_record is not None:
            with suppress(OSError, KeyError):  # a full disk; another PyTorch's record
                _write_flight_record(path)


def _write_flight_record(path: Path) -> None:
    """Write gloo's last collectives as torchfrtrace reads them; nothing if there are none.

    PyTorch writes NCCL's by itself.
    """
    record = pickle.loads(dump_flight_record())
    # gloo's group has no name in the record, and torchfrtrace looks for the name of each entry's group.
    group = record["pg_config"].pop("", None)
    if group:
        record["pg_config"]["0"] = group | {"name": "0", "desc": "default_pg"}
    if record["entries"]:
        with replacing(path, "wb") as whole:
            pickle.dump(record, whole)


def introduce(folder: Path, rank: int, device: torch.device, gather: Callable[[object], list]) -> None:
    """Print, on rank 0, where each rank runs."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    backend = dist.get_backend() if dist.is_initialized() else "no group"
    ranks = gather(f"rank {rank} on {node()}: {device} {device_name(device)}, core(s) {cores}, {backend}")
    if rank != 0:
        return
    for line in ranks:
        print_line(line)
    print_line(f"where each rank is, at intervals, and NCCL's log: {folder}/debug-rank-*.txt")
    if len(ranks) > 1:
        print_line(f"the collectives of all ranks, compared: torchfrtrace {folder}/flight-of-{len(ranks)}")
