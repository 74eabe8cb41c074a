"""An example of a job: each of its processes says which one it is. It needs no packages.

Try: manygpus submit --gpus 2 slurm/hello.py
"""

import os
import socket

if __name__ == "__main__":
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or "none"
    print(f"rank {rank} of {world_size} on {socket.gethostname()}, which sees these GPUs: {gpus}")
