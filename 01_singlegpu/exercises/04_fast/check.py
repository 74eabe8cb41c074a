"""Runs the functions of the learner's script on the CPU, and looks at what they do: no clock is read."""

import os
from collections.abc import Callable
from types import ModuleType

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset

from trainkit.workshop.work import Workspace, Wrong, is_close

ANSWERS = """\
# Before you start the script: in one step of train_epoch, including `forward`, in how many places does the
# CPU wait until the GPU has finished all its work?
prediction = 4
"""
HINTS = """\
## 1

Go through a step. Where do the images come from, and what does the GPU do meanwhile? What must the CPU know
before it can continue: a number, or which way an `if` goes? In how many bits do the layers compute? How
many kernels does the optimizer launch? And look at the last batch of an epoch, which has 16 images.

## 2

The arguments of a `DataLoader` repair three of the eight. `Tensor.to` has an argument that lets the CPU
continue. A sum of losses can stay on the device until the epoch is over. `clamp` changes nothing if no value
is too large, so it needs no `if`.
`TORCH_LOGS=graph_breaks,recompiles python exercises/04_fast/mine/slow.py` prints why torch.compile splits a
network, and why it compiles it again.

## 3

`DataLoader(..., drop_last=True, num_workers=2, persistent_workers=True, pin_memory=device.type == "cuda")`;
`images.to(device, non_blocking=True)`, and the same for the labels; `with torch.autocast(device.type,
torch.bfloat16):` around the forward pass and the loss; `total = torch.zeros((), device=device)`, in the loop
`total += loss.detach()`, and one `item()` after it; `fused=True` for the optimizer; `torch.no_grad()` around
the evaluation.
"""
SOLUTION = {
    "slow.py": '''\
@@
-"""Train a small network on digits in plain PyTorch. It runs and learns, but makes a GPU wait in eight ways.
+"""Train a small network on digits in plain PyTorch.
@@
-        if x.max() > LARGEST:
-            x = x.clamp(max=LARGEST)
+        x = x.clamp(max=LARGEST)
@@
-    return DataLoader(data, BATCH, shuffle=True)
+    return DataLoader(
+        data,
+        BATCH,
+        shuffle=True,
+        drop_last=True,
+        num_workers=2,
+        persistent_workers=True,
+        pin_memory=device.type == "cuda",
+    )
@@
-    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
+    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
@@
-    total = 0.0
+    total = torch.zeros((), device=device)
     for images, labels in loader:
-        images = images.to(device)
-        labels = labels.to(device)
+        images = images.to(device, non_blocking=True)
+        labels = labels.to(device, non_blocking=True)
         optimizer.zero_grad()
-        loss = F.cross_entropy(model(images), labels)
+        with torch.autocast(device.type, torch.bfloat16):
+            loss = F.cross_entropy(model(images), labels)
@@
-        total += loss.item()
-    return total / len(loader)
+        total += loss.detach()
+    return total.item() / len(loader)
@@
+@torch.no_grad()
 def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
''',
}
STARTS_WITH = "`prediction`"
SCRIPT = "slow.py"
BATCH = 8
PLACES = 4  # of a step of the starter, at which the CPU waits
CPU = torch.device("cpu")


def check(workspace: Workspace) -> str:
    prediction = workspace.answers().number("prediction")
    program = workspace.module(SCRIPT)
    starter = Workspace(workspace.folder.parent / "starter").module(SCRIPT)
    torch.set_num_threads(1)
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler would tell that there is no GPU
    program.BATCH = BATCH
    loaded = load(program)
    seen = train(program)
    symptoms = [
        in_one_process(loaded),
        blocking_copies(program, seen),
        waiting_for_the_loss(program, seen),
        full_precision(seen),
        many_updates(program),
        split_network(program, starter),
        compiled_again(program, loaded.sizes),
        graph_of_the_evaluation(program),
    ]
    remaining = [symptom for symptom in symptoms if symptom]
    if remaining:
        raise Wrong(f"{len(symptoms) - len(remaining)} of {len(symptoms)} repaired. Next: {remaining[0]}")
    return (
        f"All {len(symptoms)} are repaired. You predicted that the CPU waits in {prediction:g} places of a "
        f"step. At first there were {PLACES}: the two copies, the `if` of the network, and `loss.item()`. "
        "In each of them the CPU waits until the GPU has nothing left to do, so the next kernel comes late. "
        "None of the eight gave an error. On a GPU each of them only makes the training a little slower, but "
        "a profile shows most of them by name."
    )


class Loaded:
    """What two epochs of the learner's loader gave: who prepared the images, and the sizes of batches."""

    def __init__(self) -> None:
        self.processes: list[set[int]] = []
        self.sizes: list[int] = []


class Processes(Dataset):
    """Images that show the number of the process that prepared them; the last batch is not full."""

    def __len__(self) -> int:
        return 3 * BATCH + 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([os.getpid()]), torch.tensor(index)


def load(program: ModuleType) -> Loaded:
    """Go through the learner's loader twice."""
    loader = program.make_loader(Processes(), CPU)
    loaded = Loaded()
    for _ in range(2):
        batches = [images for images, _ in loader]
        loaded.processes.append({int(process) for images in batches for process in images})
        loaded.sizes = [len(images) for images in batches]
    return loaded


def in_one_process(loaded: Loaded) -> str | None:
    first, second = loaded.processes
    if os.getpid() in first:
        return (
            "The images are prepared in the process that trains. While this process prepares a batch, it "
            "launches nothing, and the GPU waits. Who else could prepare the next batch?"
        )
    if first != second:
        return (
            "Every epoch starts new loader workers, and waits until they are ready. Let the workers of the "
            "first epoch serve all epochs."
        )
    return None


class OnTheHost:
    """A batch that has not been copied to the device; notes how it is copied, and is the same tensor then."""

    def __init__(self, tensor: torch.Tensor, copies: list[bool]) -> None:
        self.tensor = tensor
        self.copies = copies

    def to(self, *target: object, non_blocking: bool = False, **more: object) -> torch.Tensor:
        self.copies.append(non_blocking)
        return self.tensor.to(*target, **more)

    def cuda(self, device: object = None, non_blocking: bool = False) -> torch.Tensor:
        self.copies.append(non_blocking)
        return self.tensor

    def __len__(self) -> int:
        return len(self.tensor)


def batches(sizes: list[int], copies: list[bool]) -> list[tuple[OnTheHost, OnTheHost]]:
    """Return batches of random images, the same in every call."""
    random = torch.Generator().manual_seed(1)
    return [
        (
            OnTheHost(torch.rand(size, 1, 28, 28, generator=random), copies),
            OnTheHost(torch.randint(10, (size,), generator=random), copies),
        )
        for size in sizes
    ]


def small_network(layers: int = 1) -> nn.Module:
    torch.manual_seed(1)
    more = [nn.Linear(16, 16) for _ in range(layers - 1)]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), *more, nn.Linear(16, 10))


class Answers(nn.Module):
    """A network that keeps its answers, and waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_network()
        self.kept: list[torch.Tensor] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        answers = self.layers(images)
        self.kept.append(answers.detach())
        return answers


class Trained:
    """What two epochs did, one of 3 steps and one of 6."""

    def __init__(self) -> None:
        self.waits: list[int] = []
        self.losses: list[tuple[float, float]] = []  # as returned, and as it should be
        self.copies: list[bool] = []
        self.types: set[torch.dtype] = set()
        self.type_of_weights = torch.float32


def train(program: ModuleType) -> Trained:
    """Run the learner's train_epoch under the profiler."""
    seen = Trained()
    for steps in (3, 6):
        model = Answers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        chosen = batches(steps * [BATCH], seen.copies)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            returned = program.train_epoch(model, chosen, optimizer, CPU)
        calls = {event.key: event.count for event in profiler.key_averages()}
        seen.waits.append(calls.get("aten::item", 0))
        pairs = zip(model.kept, chosen, strict=True)
        of_batches = [F.cross_entropy(kept.float(), labels.tensor).item() for kept, (_, labels) in pairs]
        seen.losses.append((float(returned), sum(of_batches) / steps))
        seen.types |= {kept.dtype for kept in model.kept}
        seen.type_of_weights = model.layers[-1].weight.dtype
    return seen


def blocking_copies(program: ModuleType, seen: Trained) -> str | None:
    if not all(seen.copies):
        return (
            "A batch is copied by a call that waits until the GPU has finished all its work and has the "
            "batch. `to` has an argument for a copy that the CPU does not wait for."
        )
    if not program.make_loader(Processes(), torch.device("cuda")).pin_memory:
        return (
            "The copies do not block, but the batches are in ordinary memory, from which a GPU cannot copy "
            "by itself. In each step the CPU first copies them into memory that the GPU can read (pinned "
            "memory). A thread of the loader can do that ahead of time."
        )
    return None


def waiting_for_the_loss(program: ModuleType, seen: Trained) -> str | None:
    few, many = seen.waits
    if many > few:
        return (
            f"In 3 steps the CPU asks the GPU for a number {few} times, in 6 steps {many} times. Each time "
            "it waits until the GPU has finished all its work. Once after the epoch is enough."
        )
    for returned, true in seen.losses:
        if not is_close(returned, true, 0.02):
            return f"The mean loss of an epoch is {true:.3f}, but train_epoch returns {returned:.3f}."
    return None


def full_precision(seen: Trained) -> str | None:
    if seen.type_of_weights != torch.float32:
        return (
            f"The weights are {seen.type_of_weights} now, so small updates of them are lost. Only the layers "
            "should compute in 16 bits, which is what autocast does."
        )
    if torch.float16 in seen.types:
        return (
            "The layers compute in float16, in which small gradients become 0 unless a GradScaler enlarges "
            "the loss. bfloat16 has the range of float32."
        )
    if torch.float32 in seen.types:
        return (
            "The layers compute in float32. On a GPU, bfloat16 takes half the bytes and uses faster units. "
            "Switch it on for the CPU as well, since the check runs there."
        )
    return None


def many_updates(program: ModuleType) -> str | None:
    calls = []
    for layers in (1, 5):
        model = small_network(layers)
        optimizer = program.make_optimizer(model)
        model(torch.rand(BATCH, 784)).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            optimizer.step()
        events = profiler.key_averages()
        if any("_fused_" in event.key for event in events):
            return None
        calls.append(sum(event.count for event in events if event.key.startswith("aten::")))
    few, many = calls
    if any("_foreach_" in event.key for event in events):
        return (
            "The optimizer updates the weights list by list (foreach), in several kernels. That is the "
            "default on a GPU. A single kernel can do all of it."
        )
    return (
        f"To update 4 weights and biases, the optimizer calls {few} operators; for 12 it calls {many}. On a "
        "GPU the CPU launches one or several kernels for each. A single kernel can do all of it."
    )


def split_network(program: ModuleType, starter: ModuleType) -> str | None:
    torch.manual_seed(1)
    model = program.Net()
    torch._dynamo.reset()
    explained = torch._dynamo.explain(model)(torch.rand(BATCH, 1, 28, 28))
    if explained.graph_break_count:
        line = explained.break_reasons[0].user_stack[-1].line
        return (
            f"torch.compile splits the network into {explained.graph_count} graphs, at `{line}`. There the "
            "CPU needs a value from the GPU, or does something that no kernel can do."
        )
    reference = starter.Net()
    reference.load_state_dict(model.state_dict())
    for brightness in (1, 1000):
        images = brightness * torch.rand(BATCH, 1, 28, 28)
        if not torch.allclose(model(images), reference(images), rtol=1e-3, atol=1e-4):
            return (
                "The network is in one piece, but its output has changed: before, no feature was larger than "
                "LARGEST."
            )
    return None


def compiled_again(program: ModuleType, sizes: list[int]) -> str | None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(model, backend=counting)
    for _ in range(2):
        program.train_epoch(compiled, batches(sizes, []), optimizer, CPU)
    if len(graphs) > 1:
        return (
            f"torch.compile compiles the network {len(graphs)} times, since the batches of an epoch have "
            f"{', '.join(map(str, sizes))} images. Each time, the training waits for seconds or minutes. "
            "Give all batches the same size, which a CUDA graph needs, too."
        )
    return None


class Asked(nn.Module):
    """Answers that every image is a 0, and notes whether a backward pass is prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[bool] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.graphs.append(torch.is_grad_enabled())
        return F.one_hot(torch.zeros(len(images), dtype=torch.int64), 10).float()


def graph_of_the_evaluation(program: ModuleType) -> str | None:
    model = Asked()
    test_batches = batches([BATCH, BATCH], [])
    accuracy = program.evaluate(model, test_batches, CPU)
    if any(model.graphs):
        return (
            "The evaluation keeps the output of every layer in memory, for a backward pass that never comes."
        )
    zeros = [float((labels.tensor == 0).sum()) for _, labels in test_batches]
    true = 100 * sum(zeros) / (2 * BATCH)
    if not is_close(accuracy, true, 0.001):
        return f"The accuracy is {true:.1f} %, but evaluate returns {accuracy:.1f}."
    return None


CLAMP = "        x = x.clamp(max=LARGEST)\n"
NO_NAN = "        if x.isnan().any():\n            raise ValueError\n"
WORKERS = "num_workers=2,\n        persistent_workers=True,"
AUTOCAST = "with torch.autocast(device.type, torch.bfloat16):"
WRONG = [
    (SCRIPT, WORKERS, "num_workers=0,", "that trains"),
    (SCRIPT, "persistent_workers=True", "persistent_workers=False", "new loader workers"),
    (SCRIPT, "labels.to(device, non_blocking=True)", "labels.to(device)", "is copied by a call that waits"),
    (SCRIPT, 'pin_memory=device.type == "cuda"', "pin_memory=False", "ordinary memory"),
    (SCRIPT, "total += loss.detach()", "total += loss.item()", "asks the GPU for a number"),
    (SCRIPT, "total.item() / len(loader)", "loss.item()", "The mean loss of an epoch is"),
    (SCRIPT, AUTOCAST, "if True:", "compute in float32"),
    (SCRIPT, "bfloat16):", 'bfloat16, enabled=device.type == "cuda"):', "for the CPU as well"),
    (SCRIPT, "torch.bfloat16", "torch.float16", "GradScaler"),
    (SCRIPT, ", fused=True", "", "operators; for 12"),
    (SCRIPT, "fused=True", "foreach=True", "list by list"),
    (SCRIPT, CLAMP, NO_NAN + CLAMP, "into 2 graphs, at `if x.isnan().any():`"),
    (SCRIPT, CLAMP, "", "its output has changed"),
    (SCRIPT, "        drop_last=True,\n", "", "compiles the network 2 times"),
    (SCRIPT, "@torch.no_grad()\n", "", "a backward pass that never comes"),
]
