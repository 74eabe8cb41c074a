"""Runs the learner's script in two processes, sends them signals, starts it again, compares the weights."""

import json
import multiprocessing
import os
import re
import signal
import tempfile
import time
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from manygpus.data import synthetic
from manygpus.jobs import slurm
from manygpus.launchers import free_port
from manygpus.process import end_with
from manygpus.workshop.ranks import IN_VAIN, error_in_words, meet
from manygpus.workshop.work import Workspace, Wrong

ANSWERS = """\
# Before you change the script: what does USR2 do to it as it is? It `dies`, `saves` or `ignores` it.
prediction = dies
# As it is, it gets kill -9 after 150 of the 187 steps of an epoch. How many steps will be done twice?
repeated = 150
# USR2, TERM or KILL: which of them can no program catch?
never_caught = KILL
"""
HINTS = """\
## 1

`signal.signal(signal.SIGUSR2, handler)` calls `handler(number, frame)` in the middle of whatever the script
does. So the handler only notes that the signal has come. Look at the note after a step, and do the same for
SIGTERM.

## 2

The signal does not come to all ranks in the same step. After a step, `dist.all_reduce` of the number of
signals gives all ranks the same sum: if it is above 0, all of them leave the loop after that step. Rank 0
saves the weights, the optimizer, the epoch and the number of its steps that are done.

## 3

The new start skips those steps: `for step, (images, labels) in enumerate(batches, start=1)` with
`if step <= done: continue`. Write a checkpoint to `last.new`, and then `.replace(last)` it. After a stop,
rank 0 makes the file `stopped` in the folder `os.environ["MANYGPUS_JOB_DIR"]`, and all ranks return from
`main`.
"""
SOLUTION = {
    "train.py": '''\
@@
-It saves after every epoch, and has no handler for signals yet. This is the solution of exercise convert.
+It saves after every epoch, and when Slurm signals that the job is about to end. Started again, it resumes.
@@
 import os
+import signal
 from pathlib import Path
@@
 BATCH = 32  # images of an optimizer step, on all ranks together
+JOB = Path(os.environ.get("MANYGPUS_JOB_DIR", "."))  # stays the same when the job is requeued
+signals_received = []
@@
     options = parser.parse_args(arguments)
+    for stop_signal in (signal.SIGUSR2, signal.SIGTERM):
+        signal.signal(stop_signal, lambda number, _: signals_received.append(number))
@@
     begin = 0
+    done = 0  # steps of the epoch
     best = 0.0
@@
         begin = state["epoch"]
+        done = state["step"]
         best = state["best"]
@@
-        loss = train_epoch(ddp, batches, optimizer, device)
+        loss, done = train_epoch(ddp, batches, optimizer, device, done)
+        if must_stop(device):
+            if rank == 0:
+                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
+                write_whole(state | {"epoch": epoch, "step": done, "best": best}, last)
+                print(f"saved and stopped in epoch {epoch + 1} after {done} of {len(batches)} steps")
+                (JOB / "stopped").touch()  # the job script sends the job back to the queue
+            dist.barrier()  # no rank leaves before the file is complete
+            break
+        done = 0
@@
-        torch.save(state | {"epoch": epoch + 1, "best": best}, last)
+        write_whole(state | {"epoch": epoch + 1, "step": 0, "best": best}, last)
@@
-def train_epoch(
-    model: nn.Module, batches: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device
-) -> float:
-    """Train for one epoch; return its mean loss."""
+def must_stop(device: torch.device) -> bool:
+    """Return whether any rank has received a signal: all ranks get the same answer."""
+    received = torch.tensor(float(len(signals_received)), device=device)
+    dist.all_reduce(received)
+    return received.item() > 0
+
+
+def write_whole(state: dict[str, object], path: Path) -> None:
+    """Write the file whole or not at all: if this process is killed meanwhile, the old file stays."""
+    unfinished = path.with_suffix(".new")
+    torch.save(state, unfinished)
+    unfinished.replace(path)
+
+
+def train_epoch(
+    model: nn.Module,
+    batches: DataLoader,
+    optimizer: torch.optim.Optimizer,
+    device: torch.device,
+    done: int,
+) -> tuple[float, int]:
+    """Train for an epoch of which some steps are done, or until a signal.
+
+    Return the mean loss since this start, and how many steps of the epoch are done.
+    """
@@
-    for images, labels in batches:
-        optimizer.zero_grad()
+    step = done
+    for number, (images, labels) in enumerate(batches, start=1):
+        if number <= done:
+            continue
+        optimizer.zero_grad()
@@
         losses += loss.detach()
+        step = number
+        if must_stop(device):
+            break
@@
-    return losses.item() / len(batches) / dist.get_world_size()
+    return losses.item() / max(step - done, 1) / dist.get_world_size(), step
''',
}
STARTS_WITH = "`prediction`"
SCRIPT = "train.py"
LOG = "job.txt"
SAVED = "last.pt"
JOB = "job"  # the folder of the job, which is not that of the checkpoints
AGREE = "    dist.all_reduce(received)\n"
LEAVE = "            dist.barrier()  # no rank leaves before the file is complete\n            break\n"
WRITE = "    torch.save(state, unfinished)\n    unfinished.replace(path)\n"
TOUCH = '                (JOB / "stopped").touch()  # the job script sends the job back to the queue\n'
AFTER_A_STEP = "        step = number\n        if must_stop(device):\n            break\n"
END = "    dist.destroy_process_group()\n"
WRONG = [
    ("answers.txt", "= 150", "= 0", "no signal that a program could catch"),
    ("answers.txt", "= 150", "= 37", "when does the script as it is save"),
    ("answers.txt", "= KILL", "= TERM", "accepts a handler"),
    (SCRIPT, "(signal.SIGUSR2, signal.SIGTERM)", "(signal.SIGUSR2,)", "SIGTERM ended rank 1"),
    (SCRIPT, AGREE, "", "Have the ranks agree"),
    (SCRIPT, AGREE, "    dist.broadcast(received, src=0)\n", "to rank 1 in step"),
    (SCRIPT, AFTER_A_STEP, "        step = number\n", "ended after step 24"),
    (SCRIPT, '"step": done, ', '"step": 0, ', "trains again on the images of"),
    (SCRIPT, '{"epoch": epoch, "step"', '{"epoch": epoch + 1, "step"', "belong to no step"),
    (SCRIPT, '        optimizer.load_state_dict(state["optimizer"])\n', "", "lost its momentum"),
    (SCRIPT, '        model.load_state_dict(state["model"])\n', "", "its weights are not those"),
    (SCRIPT, "    if last.exists():", "    if False:", "begins again with the first step"),
    (SCRIPT, WRITE, "    torch.save(state, path)\n", "kill -9 while it wrote"),
    (SCRIPT, TOUCH, "", "`stopped` is missing"),
    (
        SCRIPT,
        '(JOB / "stopped").touch()',
        'last.with_name("stopped").touch()',
        "that the variable MANYGPUS_JOB_DIR",
    ),
    (SCRIPT, END, "    (JOB / 'stopped').touch()\n" + END, "back to the queue forever"),
    (SCRIPT, LEAVE, "            raise SystemExit(1)\n", "takes the job for failed"),
    (SCRIPT, LEAVE, "            dist.barrier() if rank == 0 else None\n            break\n", "in vain"),
    (SCRIPT, "            if rank == 0:\n", "            if True:\n", "Rank 1 writes last.new"),
    (SCRIPT, "        done = 0\n", "", "your script makes 24"),
    (SCRIPT, '"step": done, "best": best}', '"step": done, "best": 0.0}', "lost the best accuracy"),
]
SIZE = 2  # ranks
STEPS = 24  # of an epoch
EPOCHS = 2
BATCH = 32
VALIDATE = 65  # images
SOON = 15  # steps within which the ranks have to stop
END_SECONDS = 5  # for the other rank, when one has failed


class Signal(NamedTuple):
    """A signal that each rank gets in a step, counted from the start of the run."""

    number: int
    steps: tuple[int | None, ...]  # by rank; None: it does not get it
    kill: bool = False  # whether kill -9 ends rank 0 in the middle of the first file that it then writes


class Rank(NamedTuple):
    """What one rank did in a run."""

    exit_code: int  # -N: signal N ended it
    trained: list[list[int]]  # the labels of each step, which tell the batches apart
    weights: list[float]  # a number for all weights, after each step
    momentum: bool  # whether the optimizer had any before its first step
    files: list[str]  # that it wrote
    results: list[list[float]]  # what main returns
    predicted: list[int]  # the label that the weights in best.pt give each validation image
    failure: str


def check(workspace: Workspace) -> str:
    answers = workspace.answers()
    prediction = answers.word("prediction", "dies", "saves", "ignores")
    _check_answers(answers.number("repeated"), answers.word("never_caught", *SIGNALS))
    with tempfile.TemporaryDirectory() as folder:
        first, whole, parts = (Path(folder) / name for name in ("first", "whole", "parts"))
        for place in (first, whole, parts):
            _write_digits(place)
        one_epoch = _run(workspace, first, epochs=1)
        _check_whole(one_epoch, epochs=1)
        if labels := one_epoch[0].predicted:  # no later epoch is better than the first with these labels
            for place in (whole, parts):
                np.save(place / "validation-labels.npy", np.array(labels))
        expected = _run(workspace, whole)
        _check_whole(expected, EPOCHS)
        _check_stops(workspace, parts, expected)
    predicted = (
        "as you predicted" if prediction == "dies" else f"it does not do what you predicted ({prediction})"
    )
    return (
        "Stopped by USR2 and by SIGTERM, also after the last step of an epoch, and killed while it saves, "
        f"the training ends with the weights of one that nothing stops. {_job(workspace)} Without a handler "
        f"USR2 ends Python, {predicted}. Save regularly as well, for ends that nobody announces: here that "
        "is after each epoch, in a long epoch every few hundred steps."
    )


SIGNALS = ("usr2", "term", "kill", "sigusr2", "sigterm", "sigkill")


def _check_answers(repeated: float, never_caught: str) -> None:
    if repeated == 0:
        raise Wrong(
            "`repeated`: kill -9 sends no signal that a program could catch, so nothing is saved then."
        )
    if repeated not in (149, 150):
        raise Wrong("`repeated`: when does the script as it is save? All steps since then are done twice.")
    if never_caught.removeprefix("sig") != "kill":
        raise Wrong(
            "`never_caught`: `signal.signal` accepts a handler for that one. `man 7 signal` says which "
            "signals cannot be caught."
        )


def _check_whole(expected: list[Rank], epochs: int) -> None:
    """Check a run that nothing stops."""
    for rank in expected:
        if rank.failure or rank.exit_code:
            raise Wrong(rank.failure or f"Without a signal, a rank ends with the exit code {rank.exit_code}.")
        if len(rank.trained) != STEPS * epochs:
            raise Wrong(
                f"Without a signal, {epochs} epoch(s) of {STEPS} steps are {STEPS * epochs} steps, and your "
                f"script makes {len(rank.trained)}."
            )
    if expected[1].files:
        raise Wrong(f"Rank 1 writes {expected[1].files[0]}, too: only one rank may write a file.")


def _check_stops(workspace: Workspace, folder: Path, expected: list[Rank]) -> None:
    """Stop and start again a training until it is done, and compare each start with `expected`."""
    usr2, term = signal.SIGUSR2, signal.SIGTERM
    # The signals do not reach both ranks in the same step, and one may reach one rank only.
    done = _stopped(workspace, folder, expected, 0, Signal(usr2, (7, 5)))
    to_the_end = STEPS - done
    done = _stopped(workspace, folder, expected, done, Signal(term, (None, to_the_end)))
    killed = _run(workspace, folder, Signal(usr2, (4, 4), kill=True))
    _compare(killed, expected, done)
    ranks = _run(workspace, folder, Signal(usr2, (5, 3)))  # stops once more, now in the last epoch
    begun = _begun(ranks, expected)
    if _failed(ranks) or begun < done:
        raise Wrong(
            f"Rank 0 got kill -9 while it wrote a checkpoint, and the next start {_what_it_did(ranks)}. "
            "Write the checkpoint to a new file, and rename it to the old name when it is complete."
        )
    _compare(ranks, expected, begun)
    (folder / JOB / "stopped").unlink(missing_ok=True)
    done = begun + len(ranks[0].trained)
    ranks = _run(workspace, folder)
    _compare(ranks, expected, done)
    if (folder / JOB / "stopped").exists():
        raise Wrong(
            "The training is done, and the file `stopped` is there: the job would go back to the queue "
            "forever. Make the file only after a signal."
        )
    last = [rank.results[-1][1] if rank.results else None for rank in (ranks[0], expected[0])]
    if last[0] != last[1]:
        raise Wrong(
            f"The resumed training returns {last[0]} % for its last epoch, and one in one go {last[1]} %, "
            "with equal weights: is the epoch validated after its last step?"
        )
    if _bests(expected[0]) == 1 and _bests(ranks[0]):
        raise Wrong(
            "Stopped in the second epoch and started again, the script has lost the best accuracy: the "
            "second epoch overwrites best.pt, although the first was better. Save and load that number, too."
        )


def _stopped(workspace: Workspace, folder: Path, expected: list[Rank], begin: int, sent: Signal) -> int:
    """Run until the signal; return how many steps are done in all.

    Raises:
        Wrong: if the ranks do not save and stop together soon.
    """
    name = signal.Signals(sent.number).name
    ranks = _run(workspace, folder, sent)
    for number, rank in enumerate(ranks):
        if rank.exit_code == -sent.number:
            raise Wrong(f"{name} ended rank {number}: it needs a handler for that signal (`signal.signal`).")
    first = min(step for step in sent.steps if step is not None)
    if ranks[1].files:
        raise Wrong(f"Rank 1 writes {ranks[1].files[0]} at a stop, too: only one rank may write a file.")
    makes = [len(rank.trained) for rank in ranks]
    if _failed(ranks):
        where = " ".join(dict.fromkeys(rank.failure for rank in ranks if rank.failure))
        if makes[0] != makes[1] or IN_VAIN in where:
            raise Wrong(
                f"{name} came to {_in_which_steps(sent)}. Then one rank waits for another that has left. "
                f"{where} Have the ranks agree after a step, so that all leave after the same one: "
                "`dist.all_reduce` of the number of signals that each has got."
            )
        codes = ", ".join(str(rank.exit_code) for rank in ranks)
        raise Wrong(
            where
            or f"After {name} the ranks end with the exit codes {codes}, so Slurm takes the job for "
            "failed, and the job script does not reach its last line. A stop is a good end: return from "
            "`main`."
        )
    _compare(ranks, expected, begin)
    done = begin + makes[0]
    if makes[0] > first + SOON:
        raise Wrong(
            f"{name} came to {_in_which_steps(sent)}, and the ranks ended after step {makes[0]}. A signal "
            "comes a minute before the end, and an epoch may take longer than that: after every step, or "
            "every ten, ask whether any rank has one."
        )
    if not (folder / JOB / "stopped").exists():
        raise Wrong(
            "After a stop the file `stopped` is missing in the folder that the variable MANYGPUS_JOB_DIR "
            "names, so the job script would not send the job back to the queue."
        )
    (folder / JOB / "stopped").unlink()  # as the job script does
    if not ranks[0].files:
        raise Wrong(f"After {name} no rank writes a checkpoint.")
    return done


def _compare(ranks: list[Rank], expected: list[Rank], begin: int) -> None:
    """Check that each rank did the steps that one in one go does after its first `begin` ones."""
    for number, (rank, one) in enumerate(zip(ranks, expected, strict=True)):
        if not rank.trained:
            if rank.failure:
                raise Wrong(f"Started again, the script fails. {rank.failure}")
            if begin < len(one.trained) - STEPS:
                raise Wrong(
                    f"Started again after {begin} of {len(one.trained)} steps, rank {number} makes none."
                )
            continue
        where = _begun(ranks, expected, number)
        if begin and where == 0 and not rank.momentum:
            raise Wrong(f"After {begin} steps and a stop, rank {number} begins again with the first step.")
        if where < begin and where >= 0:
            raise Wrong(
                f"The checkpoint has {begin} steps, but rank {number} trains again on the images of "
                f"{begin - where} of them. Save the step of the epoch, and skip so many when you resume."
            )
        if where != begin:
            raise Wrong(
                f"Rank {number} resumes after {begin} steps, with images that belong to no step, or to a "
                "later one: does `set_epoch` get the epoch of the checkpoint, and are exactly the steps "
                "that are done skipped?"
            )
        if begin and not rank.momentum:
            raise Wrong("Resumed, the optimizer has lost its momentum: save and load its state, too.")
        if begin + len(rank.weights) > len(one.weights):
            raise Wrong(
                f"After {begin} of {len(one.weights)} steps and a stop, rank {number} makes "
                f"{len(rank.weights)} more: how many are left?"
            )
        for step, weights in enumerate(rank.weights):
            if not np.isclose(weights, one.weights[begin + step], rtol=1e-6):
                raise Wrong(
                    f"Rank {number} resumed after {begin} steps, and after {step + 1} more its weights are "
                    "not those of a training in one go. Which part of the state is not the one of that step?"
                )


def _begun(ranks: list[Rank], expected: list[Rank], number: int = 0) -> int:
    """Return after how many steps of one in one go a rank began; -1: none fits."""
    trained, one = ranks[number].trained, expected[number].trained
    if not trained:
        return len(one)
    return one.index(trained[0]) if trained[0] in one else -1


def _bests(rank: Rank) -> int:
    """Return how often a rank wrote best.pt, under whatever name before it was complete."""
    return sum(name.startswith("best") for name in rank.files)


def _failed(ranks: list[Rank]) -> bool:
    return any(rank.exit_code or rank.failure for rank in ranks)


def _what_it_did(ranks: list[Rank]) -> str:
    failures = [rank.failure for rank in ranks if rank.failure]
    return f"fails ({failures[0]})" if failures else "begins before the last good one"


def _in_which_steps(sent: Signal) -> str:
    steps = [f"rank {rank} in step {step}" for rank, step in enumerate(sent.steps) if step is not None]
    return " and to ".join(steps) + (", and not to the other" if len(steps) < SIZE else "")


def _run(workspace: Workspace, folder: Path, sent: Signal | None = None, epochs: int = EPOCHS) -> list[Rank]:
    """Run the script in two processes, as Slurm does, and return what they did."""
    context = multiprocessing.get_context("fork")
    notes = [folder / f"rank-{rank}.notes" for rank in range(SIZE)]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(SIZE)}
    place["MANYGPUS_JOB_DIR"] = str(folder / JOB)
    (folder / JOB).mkdir(exist_ok=True)
    processes = []
    with patch.dict(os.environ, place):
        for rank, path in enumerate(notes):
            path.unlink(missing_ok=True)
            arguments = (workspace, folder, rank, path, sent, epochs)
            processes.append(context.Process(target=_be_a_rank, args=arguments))
            processes[-1].start()
    try:
        while any(process.is_alive() for process in processes):
            time.sleep(0.02)
            # Slurm ends the others when one has failed.
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.join(END_SECONDS)
                break
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [_read(path, process.exitcode) for path, process in zip(notes, processes, strict=True)]


def _read(path: Path, exit_code: int) -> Rank:
    notes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def of(kind: str) -> list:
        return [note[1] for note in notes if note[0] == kind]

    return Rank(
        exit_code,
        of("trained"),
        of("weights"),
        any(of("momentum")[:1]),
        of("file"),
        next(iter(of("results")), []),
        next(iter(of("predicted")), []),
        next(iter(of("failure")), ""),
    )


def _be_a_rank(
    workspace: Workspace, folder: Path, rank: int, path: Path, sent: Signal | None, epochs: int
) -> None:
    """Run the script, and note what it does: a note is kept whatever ends the process."""
    end_with(multiprocessing.parent_process().pid)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's own name may not resolve
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    steps = 0
    wants_kill = False
    entropy, step, save = F.cross_entropy, torch.optim.SGD.step, torch.save

    def note(kind: str, what: object) -> None:
        with path.open("a") as file:
            print(json.dumps([kind, what]), file=file)

    def computed(outputs: torch.Tensor, labels: torch.Tensor, *more: object, **how: object) -> torch.Tensor:
        note("trained", labels.tolist())
        return entropy(outputs, labels, *more, **how)

    def stepped(optimizer: torch.optim.SGD, *arguments: object) -> object:
        nonlocal steps, wants_kill
        note("momentum", bool(optimizer.state))
        result = step(optimizer, *arguments)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        note("weights", sum(p.detach().double().abs().sum().item() for p in parameters))
        steps += 1
        if sent and sent.steps[rank] == steps:
            wants_kill = sent.kill
            os.kill(os.getpid(), sent.number)
        return result

    def saved(what: object, file: object, *more: object, **how: object) -> None:
        note("file", Path(str(getattr(file, "name", file))).name)
        if wants_kill and rank == 0:
            whole = BytesIO()
            save(what, whole, *more, **how)
            half = whole.getvalue()[: len(whole.getvalue()) // 2]
            if hasattr(file, "write"):
                file.write(half)
                file.flush()
            else:
                Path(file).write_bytes(half)
            os.kill(os.getpid(), signal.SIGKILL)
        save(what, file, *more, **how)

    try:
        with (
            patch.object(F, "cross_entropy", computed),
            patch.object(torch.optim.SGD, "step", stepped),
            patch.object(torch, "save", saved),
            patch.object(dist, "init_process_group", meet),
        ):
            program = workspace.module(SCRIPT)
            note("results", program.main(["--epochs", str(epochs), "--folder", str(folder)]) or [])
        if rank == 0 and epochs == 1:
            with suppress(Exception):  # a script may name its network otherwise, or save more in best.pt
                note("predicted", _predict(program, folder))
    except Exception as error:
        note("failure", str(error) if isinstance(error, Wrong) else error_in_words(rank, error))
        raise


def _predict(program: ModuleType, folder: Path) -> list[int]:
    """Return the label that the weights in best.pt give each validation image."""
    model = program.network().eval()
    model.load_state_dict(torch.load(folder / "best.pt", map_location="cpu"))
    images = torch.from_numpy(np.load(folder / "validation-images.npy") / np.float32(255))
    with torch.no_grad():
        return model(images).argmax(1).tolist()


def _write_digits(folder: Path) -> None:
    folder.mkdir()
    for name, count in (("train", STEPS * BATCH), ("validation", VALIDATE)):
        images, labels = synthetic.digits(count, seed=1)
        np.save(folder / f"{name}-images.npy", images.numpy())
        np.save(folder / f"{name}-labels.npy", labels.numpy())


def _job(workspace: Workspace) -> str:
    """Return a sentence on the job that ran the script, and came back."""
    if not (workspace.folder / LOG).exists():
        if slurm.why_not_here():
            return "Submit it as a job when you have a cluster."
        raise Wrong(
            "The script is right, and Slurm is available here: submit it as the README says, and check again."
        )
    before, requeued, after = workspace.text(LOG).partition("DUE TO JOB REQUEUE")
    epochs = [re.findall(r"^epoch (\d+): loss", text, re.MULTILINE) for text in (before, after)]
    if not requeued or not epochs[1]:
        raise Wrong(
            f"mine/{LOG} shows no job that came back from the queue and trained on: wait if it is still "
            "queued, or running. If it ended before its limit, give it more --epochs."
        )
    every = epochs[0] + epochs[1]
    if len(every) > len(set(every)):
        raise Wrong(
            f"mine/{LOG} has an epoch more than once: the job did not resume, or the log is that of several "
            "jobs. Remove the log and digits/*.pt, and submit again."
        )
    return f"As a job it went back to the queue after epoch {epochs[0][-1] if epochs[0] else 0}, and resumed."
