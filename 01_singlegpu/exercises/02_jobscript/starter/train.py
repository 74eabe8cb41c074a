"""Train a small network on made-up data, on a GPU where there is one, for a few seconds.

It needs PyTorch and nothing else. Try: python exercises/02_jobscript/mine/train.py
"""

import os
import socket
import time

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 200


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cores = len(os.sched_getaffinity(0))
    print(f"host {socket.gethostname()}, {device.type}, {cores} cores", flush=True)
    torch.manual_seed(1)
    inputs = torch.randn(4096, 64, device=device)
    targets = inputs.square().sum(dim=1, keepdim=True) / 64
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    start = time.perf_counter()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    print(f"trained {STEPS} steps in {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
