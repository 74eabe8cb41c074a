"""Runs the learner's script in two processes, as torchrun would, and watches its calls of PyTorch."""

import os
import re
import tempfile
from collections import Counter
from itertools import groupby
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock, patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from manygpus.data import synthetic
from manygpus.jobs import slurm
from manygpus.launchers import free_port
from manygpus.training.sync_on_cpu import SyncOnCPU
from manygpus.workshop.ranks import in_ranks, meet
from manygpus.workshop.work import Workspace, Wrong, is_close

ANSWERS = """\
# Before you change the script: if torchrun starts it twice, as it is, how many of the two processes train to
# the end?
prediction = 2
"""
HINTS = """\
## 1

Four things change: the processes meet and choose a device, split the data, wrap the network, and report for
all. Go through `main` from the top, and ask of every line what it does on rank 1.

## 2

LOCAL_RANK is the number of the GPU. `dist.init_process_group("gloo")`, or on GPUs
`dist.init_process_group("nccl", device_id=device)`, takes the rest from the variables of torchrun. A
`DistributedSampler(train_set, drop_last=True)` splits the training images and needs `set_epoch(epoch)`.
For validation, `Subset(validation_set, range(rank, len(validation_set), size))` leaves no image out and
counts none twice. `dist.all_reduce(tensor)` sums over all ranks.

## 3

Train through the wrapper, but validate and save the network inside it: outside the training step, the
wrapper still communicates with the other ranks, and the names of its weights begin with `module.`.
BatchNorm's running statistics are buffers, and differ between the ranks after a step. So call
`dist.broadcast(buffer, src=0)` for each of `model.buffers()` before you validate, or wrap
`nn.SyncBatchNorm.convert_sync_batchnorm(model)`. What only rank 0 does must not contain a call that the other
ranks also have to make.
"""
SOLUTION = {
    "train.py": '''\
@@
-"""Train a small network with BatchNorm on images that lie on disk, with one process on one GPU.
+"""Train a small network with BatchNorm on images that lie on disk, with one process per GPU.
@@
-Try: python exercises/06_convert/mine/train.py --epochs 3
+Try: torchrun --standalone --nproc-per-node=2 exercises/06_convert/mine/train.py --epochs 3
@@
+import os
 from pathlib import Path
@@
+import torch.distributed as dist
 import torch.nn.functional as F
@@
-from torch.utils.data import DataLoader, Dataset
+from torch.nn.parallel import DistributedDataParallel
+from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
@@
-    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
+    if not torch.cuda.is_available():
+        return torch.device("cpu")
+    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
+    torch.cuda.set_device(device)
+    return device
@@
     device = choose_device()
+    if device.type == "cuda":
+        dist.init_process_group("nccl", device_id=device)
+    else:
+        dist.init_process_group("gloo")
+    rank, size = dist.get_rank(), dist.get_world_size()
@@
-    order = torch.Generator()
-    batches = DataLoader(train_set, BATCH, shuffle=True, drop_last=True, generator=order)
-    validation_batches = DataLoader(validation_set, BATCH)
+    shards = DistributedSampler(train_set, drop_last=True)
+    batches = DataLoader(train_set, BATCH // size, sampler=shards, drop_last=True)
+    own = Subset(validation_set, range(rank, len(validation_set), size))
+    validation_batches = DataLoader(own, BATCH)
@@
+    ddp = DistributedDataParallel(model)
     optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
@@
-        order.manual_seed(epoch)
-        loss = train_epoch(model, batches, optimizer, device)
+        shards.set_epoch(epoch)
+        loss = train_epoch(ddp, batches, optimizer, device)
+        for buffer in model.buffers():  # each rank has seen different images: validate and save those of one
+            dist.broadcast(buffer, src=0)
@@
+        if rank > 0:
+            continue
         print(f"epoch {epoch + 1}: loss {loss:.4f}, {accuracy:.2f} % right")
@@
+    dist.destroy_process_group()
     return results
@@
-    return losses.item() / len(batches)
+    dist.all_reduce(losses)
+    return losses.item() / len(batches) / dist.get_world_size()
@@
+    dist.all_reduce(right)
     return 100 * (right[0] / right[1]).item()
''',
}
STARTS_WITH = "`prediction`"
SCRIPT = "train.py"
LOG = "job.txt"
TRAIN = 96  # images
VALIDATE = 65  # images, which cannot be split evenly over two ranks
Seen = dict[str, object]
EACH_RANK = (
    "BatchNorm normalises each rank's 16 images by themselves, and all ranks validate with the statistics of "
    "one: close to one process with 32 images, but not the same."
)
ALL_RANKS = (
    "BatchNorm normalises the images of all ranks together, as one process would, and communicates in every "
    "layer for that. PyTorch's SyncBatchNorm needs GPUs: here the check took a version for CPUs."
)
ON_TWO_NODES = "With one process on each of two nodes, both have LOCAL_RANK 0."


class SyncBatchNorm(SyncOnCPU):
    """Takes the place of nn.SyncBatchNorm, which refuses CPUs."""

    made = False

    def __init__(self, *arguments: object, **how: object) -> None:
        super().__init__(*arguments, **how)
        SyncBatchNorm.made = True

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: object = None) -> nn.Module:
        """Return the module with its BatchNorm layers replaced."""
        if isinstance(module, nn.BatchNorm2d):
            layer = cls(module.num_features, module.eps, module.momentum)
            layer.load_state_dict(module.state_dict())
            return layer
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child))
        return module


def check(workspace: Workspace) -> str:
    prediction = workspace.answers().number("prediction")
    program = workspace.module(SCRIPT)
    wrong_device(program)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        parts = Path(folder) / "parts"
        for place in (whole, parts):
            write_digits(place)
        ranks = run(program, whole, epochs=2)
        for wrong in (wrong_shards, wrong_step, wrong_numbers, wrong_files):
            wrong(ranks)
        wrong_names(whole)
        wrong_accuracy(program, whole, ranks[0]["results"][-1][1])
        wrong_on_two_nodes(program, parts)
        perfect(parts / "last.pt")
        wrong_resume(ranks, run(program, parts, epochs=2))
    return (
        "It is now a DDP script: equal weights, every image once, one writer, and it resumes where it "
        f"stopped. {ALL_RANKS if ranks[0]['synchronized'] else EACH_RANK} {job(workspace)} You predicted "
        f"that {prediction:.0f} processes train to the end. Both do: unchanged, each trains the same network "
        "by itself, and both write the same files, without any error."
    )


def job(workspace: Workspace) -> str:
    """Return a sentence on the job that ran the script."""
    if not (workspace.folder / LOG).exists():
        if slurm.why_not_here():
            return "Submit it as a job when you have a cluster."
        raise Wrong(
            "The script is right, and Slurm is available here: submit it as the README says, and check again."
        )
    text = workspace.text(LOG)
    epochs = re.findall(r"^epoch (\d+): loss", text, re.MULTILINE)
    if not epochs:
        raise Wrong(
            f"mine/{LOG} has no epoch: wait if the job is still running. If digits/last.pt existed, the job "
            f"had nothing left to do. The log ends with: {text.strip()[-200:]}"
        )
    if len(epochs) > len(set(epochs)):
        raise Wrong(
            f"mine/{LOG} has epoch {epochs[0]} more than once: the processes of the job did not meet, or the "
            "log is that of several jobs, with digits/last.pt removed between them. Remove the log, and "
            "submit again."
        )
    return f"As a job it has trained for {len(epochs)} epochs."


def perfect(last: Path) -> None:
    """Make the first epoch the best possible, so that no later one may take its place."""
    state = torch.load(last, weights_only=True)
    torch.save(state | {"best": 101.0}, last)


def write_digits(folder: Path) -> None:
    folder.mkdir()
    for name, count in (("train", TRAIN), ("validation", VALIDATE)):
        images, labels = synthetic.digits(count, seed=1)
        np.save(folder / f"{name}-images.npy", images.numpy())
        np.save(folder / f"{name}-labels.npy", labels.numpy())


def wrong_on_two_nodes(program: ModuleType, folder: Path) -> None:
    """Run the first epoch with one process on each of two nodes: both have local rank 0."""
    try:
        first, second = run(program, folder, epochs=1, local_rank=0)
    except Wrong as wrong:
        raise Wrong(f"{ON_TWO_NODES} {wrong}") from None
    if any(set(one) & set(other) for one, other in zip(first["read"], second["read"], strict=True)):
        raise Wrong(f"{ON_TWO_NODES} Then both take the same images. Use the rank, `dist.get_rank()`.")
    if first["files"] and second["files"]:
        raise Wrong(
            f"{ON_TWO_NODES} Then both write {second['files'][0]}, at the same time. Ask for the rank, "
            "`dist.get_rank()`."
        )


def run(program: ModuleType, folder: Path, epochs: int, local_rank: int | None = None) -> list[Seen]:
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": ""}
    with patch.dict(os.environ, place):
        return in_ranks(lambda rank, size: behave(program, folder, epochs, local_rank), size=2, group=False)


def behave(program: ModuleType, folder: Path, epochs: int, local_rank: int | None) -> Seen:
    """Run the script in this rank, and return what it read, computed and wrote."""
    if local_rank is not None:
        os.environ["LOCAL_RANK"] = str(local_rank)
    read = []
    losses = []
    backward = []
    gradients = []
    files = []
    means = []
    make = program.Images.__init__
    get = program.Images.__getitem__
    # The script may leave the group at the end of main, as plain_ddp.py does, so the call is what counts.
    joined = Mock(side_effect=meet)
    step = torch.optim.SGD.step
    save = torch.save
    entropy = F.cross_entropy
    make_loader = DataLoader.__init__
    back = torch.Tensor.backward
    normalize = nn.BatchNorm2d.forward

    def made(images: object, where: Path, name: str) -> None:
        make(images, where, name)
        images.of = name

    def made_loader(loader: DataLoader, *arguments: object, **how: object) -> None:
        # What workers read would not be seen here.
        make_loader(loader, *arguments, **how | {"num_workers": 0, "persistent_workers": False})

    def got(images: object, number: int) -> object:
        read.append((images.of, int(number)))
        return get(images, number)

    def stepped(optimizer: torch.optim.SGD, *arguments: object) -> object:
        gradients.append(sum(p.grad.abs().sum().item() for p in optimizer.param_groups[0]["params"]))
        return step(optimizer, *arguments)

    def computed(*arguments: object, **how: object) -> torch.Tensor:
        loss = entropy(*arguments, **how)
        losses.append(loss.item())
        return loss

    def went_back(loss: torch.Tensor, *arguments: object, **how: object) -> None:
        backward.append(loss.item())
        back(loss, *arguments, **how)

    def saved(what: object, file: object, *more: object, **how: object) -> None:
        files.append(Path(str(file)).name)
        save(what, file, *more, **how)

    def normalized(layer: nn.BatchNorm2d, images: torch.Tensor) -> torch.Tensor:
        if not layer.training:
            means.append((layer.running_mean.sum().item(), layer.running_var.sum().item()))
        return normalize(layer, images)

    with (
        patch.object(program.Images, "__init__", made),
        patch.object(program.Images, "__getitem__", got),
        patch.object(DataLoader, "__init__", made_loader),
        patch.object(dist, "init_process_group", joined),
        patch.object(torch.optim.SGD, "step", stepped),
        patch.object(torch, "save", saved),
        patch.object(F, "cross_entropy", computed),
        patch.object(torch.Tensor, "backward", went_back),
        patch.object(nn.BatchNorm2d, "forward", normalized),
        patch.object(nn, "SyncBatchNorm", SyncBatchNorm),
    ):
        results = program.main(["--epochs", str(epochs), "--folder", str(folder)])
    return {
        "met": joined.called,
        "read": [[number for _, number in of] for _, of in groupby(read, key=lambda one: one[0])],
        "steps": len(gradients),
        "gradients": gradients,
        "losses": losses,
        "backward": backward,
        "means": means,
        "files": files,
        "synchronized": SyncBatchNorm.made,
        "results": results,
    }


def wrong_device(program: ModuleType) -> None:
    for rank, local_rank in ((2, 1), (1, 1), (2, 0)):  # of nodes with two GPUs, in one order or another
        wrong_gpu(program, rank, local_rank)


def wrong_gpu(program: ModuleType, rank: int, local_rank: int) -> None:
    taken = []
    with (
        patch.dict(os.environ, {"RANK": f"{rank}", "LOCAL_RANK": f"{local_rank}", "WORLD_SIZE": "4"}),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "device_count", lambda: 2),
        patch.object(torch.cuda, "set_device", taken.append),
        patch.object(dist, "get_rank", lambda: rank),
        patch.object(dist, "get_world_size", lambda: 4),
        patch.object(dist, "init_process_group"),  # a script may meet the others here, too
    ):
        device = program.choose_device()
    if device is None:
        raise Wrong("`choose_device` returns no device: network and images would stay on the CPU.")
    chosen = [
        getattr(one, "index", one) for one in (device, *taken)
    ]  # `cuda` without an index is what was set
    index = next((one for one in chosen if one is not None), 0)
    if local_rank and index == 0:
        raise Wrong(
            f"Rank {rank}, with local rank 1, takes GPU 0 of its node, which belongs to local rank 0. "
            "Without an index, `cuda` is the first GPU."
        )
    if index != local_rank:
        why = "there is none" if index > 1 else "it belongs to local rank 1"
        raise Wrong(
            f"Rank {rank} has local rank {local_rank} on its node of two GPUs, and takes GPU {index}: {why}."
        )
    if not taken:
        raise Wrong(
            "Also call `torch.cuda.set_device` in `choose_device`. Otherwise NCCL, and code that asks for "
            "`cuda` without an index, use the first GPU."
        )


def wrong_shards(ranks: list[Seen]) -> None:
    if not all(seen["met"] for seen in ranks):
        raise Wrong("The two processes did not meet: each trained its own network.")
    for rank, seen in enumerate(ranks):
        if len(seen["read"]) != 4:
            raise Wrong(
                f"Rank {rank} does not train and validate in turn, twice in two epochs: each rank has to "
                "validate its own shard, and all ranks sum up their results."
            )
    first, second = (seen["read"] for seen in ranks)
    steps = ranks[0]["steps"] // 2
    size = (len(first[0]) + len(second[0])) / max(steps, 1)
    trained = Counter(first[0] + second[0])
    if trained and min(trained.values()) == 2:
        raise Wrong(f"In an epoch, each of the {len(trained)} images is trained twice, once on each rank.")
    if size > 32:
        raise Wrong(f"An optimizer step takes {size:.0f} images on both ranks together, not 32.")
    if len(trained) < TRAIN:
        raise Wrong(f"In an epoch, {TRAIN - len(trained)} of {TRAIN} images are left out.")
    if first[0] == first[2]:
        raise Wrong(
            "The second epoch has the images in the same order as the first, and so does every later one."
        )
    validated = Counter(first[1] + second[1])
    twice = sum(count > 1 for count in validated.values())
    if twice:
        raise Wrong(f"Of {VALIDATE} validation images, {twice} are counted twice: once on each rank.")
    if len(validated) < VALIDATE:
        raise Wrong(f"Of {VALIDATE} validation images, {VALIDATE - len(validated)} are left out.")


def wrong_step(ranks: list[Seen]) -> None:
    first, second = ranks
    if not np.allclose(first["gradients"], second["gradients"], rtol=1e-5):
        raise Wrong("The ranks take their steps with different gradients: their networks drift apart.")
    share = sum(first["backward"]) / sum(first["losses"])
    if not is_close(share, 1, 0.01):
        raise Wrong(
            f"You multiply the loss by {share:.2f} before `backward`. DDP averages the gradients over the "
            "ranks already."
        )


def wrong_numbers(ranks: list[Seen]) -> None:
    losses, accuracies = zip(*(zip(*seen["results"], strict=True) for seen in ranks), strict=True)
    steps = ranks[0]["steps"] // 2
    true = np.mean([seen["losses"][:steps] for seen in ranks])
    if not is_close(losses[0][0], true, 1e-3):
        raise Wrong(f"The mean loss of the first epoch is {true:.4f}, but rank 0 returns {losses[0][0]:.4f}.")
    if ranks[0]["means"][0] != ranks[1]["means"][0]:
        raise Wrong(
            "The ranks validate different networks: each has BatchNorm statistics of its own images, and "
            "DDP sends those of rank 0 only at the next training step. The README has two ways to mend this. "
            "(If you use SyncBatchNorm on GPUs only, CPUs still need the broadcast.)"
        )
    if accuracies[0] != accuracies[1]:
        raise Wrong(
            f"Rank 0 returns {accuracies[0][0]:.2f} % and rank 1 {accuracies[1][0]:.2f} %: each is the "
            "accuracy of one shard only."
        )


def wrong_files(ranks: list[Seen]) -> None:
    if ranks[0]["files"] and ranks[1]["files"]:
        raise Wrong(f"Both ranks write {ranks[1]['files'][0]}, at the same time.")
    if not {"best.pt", "last.pt"} <= {*ranks[0]["files"], *ranks[1]["files"]}:
        raise Wrong("best.pt or last.pt is missing: no rank writes it.")


def wrong_names(folder: Path) -> None:
    names = torch.load(folder / "best.pt", weights_only=True)
    if any(name.startswith("module.") for name in names):
        raise Wrong(
            "The names in best.pt begin with `module.`, so the plain network cannot load the weights."
        )


def wrong_accuracy(program: ModuleType, folder: Path, said: float) -> None:
    """Compare the accuracy of the last epoch with that of the weights that were saved after it."""
    model = program.network().eval()
    weights = torch.load(folder / "last.pt", weights_only=True)["model"]
    # Those of the wrapper will do, if the script also loads them into it.
    model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in weights.items()})
    images = torch.from_numpy(np.load(folder / "validation-images.npy") / np.float32(255))
    labels = torch.from_numpy(np.load(folder / "validation-labels.npy"))
    with torch.no_grad():
        right = int((model(images).argmax(1) == labels).sum())
    true = 100 * right / VALIDATE
    if not is_close(said, true, 1e-3):
        raise Wrong(
            f"The network classifies {right} of {VALIDATE} validation images correctly, {true:.2f} %, but "
            f"the script returns {said:.2f} %. Over all ranks, sum how many are right and how many there "
            "are, and then divide."
        )


def wrong_resume(whole: list[Seen], resumed: list[Seen]) -> None:
    epochs = len(resumed[0]["results"])
    if epochs != 1:
        raise Wrong(f"After one of two epochs, the resumed run trains {epochs} more.")
    if "best.pt" in resumed[0]["files"]:
        raise Wrong("A resumed run forgets the best accuracy, and its first epoch overwrites best.pt.")
    (loss, _) = resumed[0]["results"][0]
    (in_one_go, _) = whole[0]["results"][1]
    if not is_close(loss, in_one_go, 1e-5):
        raise Wrong(
            f"Resumed after one epoch, the second epoch has a loss of {loss:.6f}. Without a stop, its loss "
            f"is {in_one_go:.6f}."
        )


ACCURACY = "        accuracy = validate("
ALONE = "        if rank > 0:\n            results.append((loss, 0.0))\n            continue\n"
MEAN = "    right /= right[1].clone()\n    dist.all_reduce(right)\n"
OWN = "DataLoader(own, BATCH)"
BATCHES = "in batches:\n            right"
ON_ONE = "in batches if dist.get_rank() == 0 else []:\n            right"
PADDED = "DataLoader(validation_set, BATCH, sampler=DistributedSampler(validation_set, shuffle=False))"
WRONG = [
    (SCRIPT, '["LOCAL_RANK"]) % torch.cuda.device_count()', '["RANK"])', "takes GPU 2: there is none"),
    (SCRIPT, ', int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()', "", "takes GPU 0 of its node"),
    (SCRIPT, 'int(os.environ["LOCAL_RANK"])', 'int(os.environ["RANK"]) // 2', "takes GPU 0 of its node"),
    (SCRIPT, "    torch.cuda.set_device(device)\n", "", "call `torch.cuda.set_device`"),
    (SCRIPT, "size = dist.get_rank()", 'size = int(os.environ["LOCAL_RANK"])', "take the same images"),
    (SCRIPT, "        if rank > 0:\n", '        if os.environ["LOCAL_RANK"] != "0":\n', "both write best.pt"),
    (SCRIPT, '{"model": model.state', '{"model": ddp.state', "stops with RuntimeError"),
    (SCRIPT, "BATCH // size, sampler=shards", "BATCH // size, shuffle=True", "is trained twice"),
    (SCRIPT, "BATCH // size", "BATCH", "takes 64 images"),
    (SCRIPT, "        shards.set_epoch(epoch)\n", "", "the same order as the first"),
    (SCRIPT, OWN, PADDED, "are counted twice"),
    (SCRIPT, "train_epoch(ddp", "train_epoch(model", "different gradients"),
    (SCRIPT, "loss.backward()", "(loss / dist.get_world_size()).backward()", "by 0.50 before"),
    (SCRIPT, "    dist.all_reduce(losses)\n", "", "The mean loss of the first epoch"),
    (SCRIPT, "            dist.broadcast(buffer, src=0)\n", "            pass\n", "different networks"),
    (SCRIPT, "buffer in model.buffers()", "buffer in [*model.buffers()][:1]", "different networks"),
    (SCRIPT, "    dist.all_reduce(right)\n", "", "of one shard only"),
    (SCRIPT, "    dist.all_reduce(right)\n", "    dist.broadcast(right, src=0)\n", "Over all ranks, sum"),
    (SCRIPT, "    dist.all_reduce(right)\n", MEAN, "Over all ranks, sum"),
    (SCRIPT, BATCHES, ON_ONE, "does not train and validate in turn"),
    (SCRIPT, "        if rank > 0:\n            continue\n", "", "Both ranks write best.pt"),
    (SCRIPT, "torch.save(model.state", "torch.save(ddp.state", "begin with `module.`"),
    (SCRIPT, ACCURACY, ALONE + ACCURACY, "wait for each other in vain"),
    (SCRIPT, '        optimizer.load_state_dict(state["optimizer"])\n', "", "Resumed after one epoch"),
    (SCRIPT, '        begin = state["epoch"]\n', "", "trains 2 more"),
    (SCRIPT, '        best = state["best"]\n', "", "forgets the best"),
    (SCRIPT, "    return device\n", "", "returns no device"),
    (SCRIPT, "    if last.exists", "    if rank == 0 and last.exists", "wait for each other in vain"),
]  # fmt: skip
