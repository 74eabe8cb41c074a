"""Reads the learner's program, and what its last run has seen: how often each operator ran, and graphs."""

import json
import re
from collections.abc import Mapping
from hashlib import sha256

from manygpus.workshop.work import Workspace, Wrong

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
`TORCH_LOGS=graph_breaks,recompiles python exercises/11_fast/mine/slow.py` prints why torch.compile splits a
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
RECORDED = {"01_singlegpu/exercises/11_fast/recorded": []}
SCRIPT = "slow.py"
SEEN = "runs/seen.json"
PLACES = 4  # of a step of the starter, at which the CPU waits
IMAGES = 2_000  # of an epoch
STEPS = 31  # of an epoch, those with a full batch
FUSED = '"aten::_fused_sgd_"'
WRONG = [
    (SEEN, '"aten::resize_": 221', '"aten::div": 2000', "that trains"),
    (SCRIPT, "persistent_workers=True", "persistent_workers=False", "new loader workers"),
    (SCRIPT, "labels.to(device, non_blocking=True)", "labels.to(device)", "is copied by a call that waits"),
    (SCRIPT, '        pin_memory=device.type == "cuda",\n', "", "ordinary memory"),
    (SEEN, '"aten::item": 2', '"aten::item": 33', "asks the GPU for a number"),
    (SEEN, '"ToCopyBackward0"', '"none"', "for the CPU as well"),
    (SCRIPT, "torch.bfloat16", "torch.float16", "GradScaler"),
    (SEEN, '"torch.float32"', '"torch.bfloat16"', "Only the layers"),
    (SEEN, FUSED, '"aten::mul_"', "operator by operator"),
    (SEEN, FUSED, '"aten::_foreach_add_"', "list by list"),
    (SEEN, '"graphs": 1', '"graphs": 2', "the batches of an epoch"),
    (SEEN, '"aten::resize_": 221', '"aten::is_nonzero": 31', "which way an `if` goes"),
    (SCRIPT, "        x = x.clamp(max=LARGEST)\n", "", "its output has changed"),
    (SCRIPT, "@torch.no_grad()\n", "", "a backward pass that never comes"),
    (SCRIPT, "EPOCHS = 3", "EPOCHS = 4", "run it once more"),
]


def check(workspace: Workspace) -> str:
    prediction = workspace.answers().number("prediction")
    text = workspace.text(SCRIPT)
    if not (workspace.folder / SEEN).exists():
        raise Wrong(f"There is no mine/{SEEN} yet, which mine/{SCRIPT} writes at its end: run it.")
    seen = json.loads(workspace.text(SEEN))
    calls = seen["calls"]
    symptoms = [
        in_one_process(calls, text),
        blocking_copies(text),
        waiting_for_the_loss(calls),
        full_precision(seen, text),
        many_updates(calls),
        split_network(calls, text),
        compiled_again(seen["graphs"]),
        graph_of_the_evaluation(text),
    ]
    remaining = [symptom for symptom in symptoms if symptom]
    if remaining:
        raise Wrong(f"{len(symptoms) - len(remaining)} of {len(symptoms)} repaired. Next: {remaining[0]}")
    if seen["program"] != sha256(text.encode()).hexdigest():
        raise Wrong(f"You have changed mine/{SCRIPT} since its last run: run it once more.")
    return (
        f"All {len(symptoms)} are repaired. You predicted that the CPU waits in {prediction:g} places of a "
        f"step. At first there were {PLACES}: the two copies, the `if` of the network, and `loss.item()`. "
        "In each of them the CPU waits until the GPU has nothing left to do, so the next kernel comes late. "
        "None of the eight gave an error. On a GPU each of them only makes the training a little slower, but "
        "a profile shows most of them by name."
    )


def is_set(argument: str, text: str) -> bool:
    """Return whether the program gives an argument a value that is not False."""
    return bool(re.search(rf"\b{argument}=(?!False|0\b)", text))


def in_one_process(calls: Mapping[str, int], text: str) -> str | None:
    if calls.get("aten::div", 0) >= IMAGES:
        return (
            "The images are prepared in the process that trains. While this process prepares a batch, it "
            "launches nothing, and the GPU waits. Who else could prepare the next batch?"
        )
    if not is_set("persistent_workers", text):
        return (
            "Every epoch starts new loader workers, and waits until they are ready. Let the workers of the "
            "first epoch serve all epochs."
        )
    return None


def blocking_copies(text: str) -> str | None:
    if len(re.findall(r"\bnon_blocking=True\b", text)) < 2:
        return (
            "A batch is copied by a call that waits until the GPU has finished all its work and has the "
            "batch. `to` has an argument for a copy that the CPU does not wait for, of images and of labels."
        )
    if not is_set("pin_memory", text):
        return (
            "The copies do not block, but the batches are in ordinary memory, from which a GPU cannot copy "
            "by itself. In each step the CPU first copies them into memory that the GPU can read (pinned "
            "memory). A thread of the loader can do that ahead of time."
        )
    return None


def waiting_for_the_loss(calls: Mapping[str, int]) -> str | None:
    # An `if` on a tensor also asks for an item.
    asked = calls.get("aten::item", 0) - calls.get("aten::is_nonzero", 0)
    if asked >= STEPS:
        return (
            f"In the {STEPS} steps of an epoch the CPU asks the GPU for a number {asked} times. Each time it "
            "waits until the GPU has finished all its work. Once after the epoch is enough."
        )
    return None


def full_precision(seen: Mapping[str, object], text: str) -> str | None:
    if seen["weights"] != "torch.float32":
        return (
            f"The weights are {seen['weights']} now, so small updates of them are lost. Only the layers "
            "should compute in 16 bits, which is what autocast does."
        )
    if re.search(r"\bfloat16\b", text):
        return (
            "The layers compute in float16, in which small gradients become 0 unless a GradScaler enlarges "
            "the loss. bfloat16 has the range of float32."
        )
    # A graph that was compiled for a GPU does not show its casts.
    if "autocast" not in text or (seen["device"] == "cpu" and "ToCopyBackward0" not in seen["calls"]):
        return (
            "The layers compute in float32. On a GPU, bfloat16 takes half the bytes and uses faster units. "
            "Switch it on for the CPU as well."
        )
    return None


def many_updates(calls: Mapping[str, int]) -> str | None:
    if any("_fused_" in name for name in calls):
        return None
    if any("_foreach_" in name for name in calls):
        return (
            "The optimizer updates the weights list by list (foreach), in several kernels. That is the "
            "default on a GPU. A single kernel can do all of it."
        )
    return (
        "The optimizer updates each weight and bias operator by operator: see the rows aten::mul_ and "
        "aten::add_ of the profile. On a GPU the CPU launches one or several kernels for each. A single "
        "kernel can do all of it."
    )


def split_network(calls: Mapping[str, int], text: str) -> str | None:
    if calls.get("aten::is_nonzero", 0):
        return (
            "torch.compile splits the network into several graphs, at an `if`. There the CPU needs a value "
            "from the GPU, to know which way an `if` goes."
        )
    if len(re.findall(r"\bLARGEST\b", text)) < 2:
        return (
            "The network is in one piece, but its output has changed: before, no feature was larger than "
            "LARGEST."
        )
    return None


def compiled_again(graphs: int) -> str | None:
    if graphs > 1:
        return (
            f"torch.compile makes {graphs} graphs of the network. If it is in one piece, the batches of an "
            "epoch differ in their size: then it is compiled again, and the training waits for seconds or "
            "minutes. Give all batches the same size, which a CUDA graph needs, too."
        )
    return None


def graph_of_the_evaluation(text: str) -> str | None:
    if not re.search(r"\b(no_grad|inference_mode|set_grad_enabled)\b", text):
        return (
            "The evaluation keeps the output of every layer in memory, for a backward pass that never comes."
        )
    return None
