"""Train with Hydra, in a job that saves and resumes after its time limit or a preemption.

Try: torchrun --standalone --nproc-per-node=2 train_hydra.py optimizer.lr=0.01
"""

import os
import signal
from itertools import islice
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from loader_workers import obey_the_trainer
from omegaconf import DictConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    signals_received = []
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals_received.append(number))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(cfg.seed)
    features = torch.randn(1280, 20)
    train_set = TensorDataset(features, (features[:, 0] > features[:, 1]).long())
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(
        train_set,
        cfg.batch_size // world_size,
        sampler=sampler,
        num_workers=1,
        worker_init_fn=obey_the_trainer,
    )
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = hydra.utils.instantiate(cfg.optimizer, model.parameters())

    checkpoint = Path(HydraConfig.get().runtime.output_dir) / "last.pt"
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        print(f"rank {rank}: resumed after step {step}")
    ddp = DistributedDataParallel(model)

    first_epoch, steps_done = divmod(step, len(train_loader))
    for epoch in range(first_epoch, cfg.epochs):
        sampler.set_epoch(epoch)
        for features, labels in islice(train_loader, steps_done if epoch == first_epoch else 0, None):
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(features.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            step += 1
            stop = False
            within_epoch = step % len(train_loader) > 0  # a stop at its end would skip what follows
            if within_epoch and step % cfg.check_steps == 0:
                received = torch.tensor(len(signals_received), device=device)
                dist.all_reduce(received)  # all ranks stop after the same step
                stop = received.item() > 0
            if stop or step % cfg.save_steps == 0:
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    unfinished = checkpoint.with_suffix(".new")
                    torch.save(state, unfinished)
                    unfinished.replace(checkpoint)
                dist.barrier()
            if stop:
                if rank == 0:
                    print(f"saved and stopped after step {step}")
                    (Path(cfg.job) / "stopped").touch()  # the job script sends the job back to the queue
                dist.destroy_process_group()
                return
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
