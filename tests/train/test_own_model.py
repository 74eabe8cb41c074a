"""A copy of stage 03 with another network, data set and name trains, is recorded and compared."""

import re
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from conftest import REPOSITORY, STAGES, Script, failed, one_error, places, rows_of, succeeded

from manygpus.config.options import parse_options
from manygpus.data.loaders import generator, train_loader
from manygpus.distributed import process_group
from manygpus.launchers import DistEnv
from manygpus.record import records
from manygpus.reports import comparison
from manygpus.reports.comparison_report import report
from manygpus.training.run import Run

# What the user writes in place of the stage's lines.
NETWORK = """

class Tables(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(20, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, CLASSES))


def tables(seed: int, rows: int) -> InMemoryDataset:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 20, generator=random)
    return InMemoryDataset("random tables", inputs, TARGETS)


@entrypoint
def main() -> None:"""
CLASSIFY = ("F.cross_entropy", "3", "(inputs[:, :2].sum(1, keepdim=True) > torch.tensor([-1.0, 1.0])).sum(1)")
REGRESS = ("F.mse_loss", "1", "inputs[:, :2].sum(1, keepdim=True)")
SMALL = ("--epochs", 2, "--batch-size", 50, "--no-cuda")

# Samples of unequal length, two networks, a state that differs by rank, no schedule and no test.
STORIES = """
import os, signal, torch
from torch import nn
from manygpus.training.run import Run
from manygpus import errors
from manygpus.config.options import parse_options
from manygpus.data.datasets import InMemoryDataset
from manygpus.data.loaders import train_loader
from manygpus.distributed import process_group
from manygpus.distributed.process_group import destroy_distributed

class Stories:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.randn(3 + index % 5, 2)

class Hidden:
    value = None
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]

def collate(stories):
    return {"words": nn.utils.rnn.pad_sequence(stories, batch_first=True), "name": "stories"}

@errors.entrypoint
def main():
    opts = parse_options("")
    dist_env = process_group.init_distributed(use_gpu=False, timeout_seconds=60)
    torch.manual_seed(opts.seed)
    reader, critic, hidden = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 1), Hidden()
    torch.manual_seed(opts.seed + dist_env.rank)
    train = train_loader(Stories(), opts, dist_env, collate_fn=collate)
    model, second = (nn.parallel.DistributedDataParallel(one) for one in (reader, critic))
    first, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(second.parameters(), lr=0.1)
    extra_state, per_rank_state = {"critic": second, "critic_optimizer": other}, {"hidden": hidden}
    how = {"extra_state": extra_state, "per_rank_state": per_rank_state, "unit": "words", "per_sample": 5}
    run = Run("stories", opts, dist_env, Stories(), model, first, None, **how)
    run.resume()
    for epoch in run.epochs():
        for step, batch in enumerate(run.steps(epoch, train)):
            out, state = model(batch["words"], hidden.value)
            hidden.value = state.detach()
            loss, of_critic = out.square().mean(), (second(out.detach()) - 1).square().mean()
            for one, its in ((loss, first), (of_critic, other)):
                its.zero_grad()
                one.backward()
                its.step()
            run.log(loss=loss, critic_loss=of_critic)
            if os.environ.get("STOP") == f"{dist_env.rank} {step}":
                os.kill(os.getpid(), signal.SIGUSR2)
        run.end_of_epoch(epoch)
    run.finish()
    destroy_distributed()

main()
"""
# 16 MB of weights and 32 of the optimizer, with which two ranks resume.
LARGE = """
import re, torch
from pathlib import Path
from torch import nn
from manygpus.training.run import Run
from manygpus import errors
from manygpus.config.options import parse_options
from manygpus.data.datasets import InMemoryDataset
from manygpus.data.loaders import train_loader
from manygpus.distributed import process_group
from manygpus.distributed.process_group import destroy_distributed

def megabytes(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

@errors.entrypoint
def main():
    opts = parse_options("")
    dist_env = process_group.init_distributed(use_gpu=False, timeout_seconds=60)
    torch.manual_seed(1)
    model = nn.Linear(2000, 2000, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(1)
    samples = InMemoryDataset("own", torch.randn(4, 2000, generator=random), torch.zeros(4, 2000))
    train = train_loader(samples, opts, dist_env)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = megabytes("VmRSS")
    run = Run("own", opts, dist_env, samples, model, optimizer)
    run.resume()
    print(f"rank {dist_env.rank} took {megabytes('VmHWM') - before:.0f} MB", flush=True)
    for epoch in run.epochs():
        train.set_epoch(epoch)
        for inputs, targets in run.steps(epoch, train):
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            process_group.sum_in_place(model.weight.grad)
            optimizer.step()
            run.log(loss=loss)
        run.end_of_epoch(epoch)
    print(f"rank {dist_env.rank} ends with {model.weight.double().sum().item()}", flush=True)
    destroy_distributed()

main()
"""
OF_STORIES = ("--epochs", 2, "--batch-size", 8, "--loader", "workers")


# As the optimizers of the package schedulefree: whether they train is a mode in their groups.
WITH_A_MODE = """
class Averaging(torch.optim.AdamW):
    def __init__(self, weights, lr):
        super().__init__(weights, lr)
        self.defaults["train_mode"] = False
        self.param_groups[0] |= {"train_mode": False, "frozen": False}
    def step(self):
        self.param_groups[0] |= {"train_mode": True, "frozen": True}  # the second is the script's own
        super().step()

@errors.entrypoint
def main():"""


def own_training(task: tuple[str, str, str]) -> str:
    loss, classes, targets = task
    changes = {
        "    Net,\n": "    InMemoryDataset,\n",
        "\n\n@entrypoint\ndef main() -> None:": NETWORK.replace("CLASSES", classes).replace(
            "TARGETS", targets
        ),
        "load_dataset(opts.dataset, opts.data_dir)": "tables(1, 2000), tables(2, 500)",
        "Net(opts.width).to(": "Tables().to(",
        ", memory_format=torch.channels_last": "",
        "F.nll_loss": loss,
        'Run("ddp"': 'Run("tables"',
    }
    text = STAGES["ddp"].read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("loader", [("resident",), ("workers", "--num-workers", "1")], ids=" ".join)
def test_it_trains_and_is_recorded_as_what_it_is(loader: tuple, script: Script, tmp_path: Path) -> None:
    own_script = tmp_path / "tables.py"
    own_script.write_text(own_training(CLASSIFY))
    succeeded(
        script(own_script, *SMALL, "--epochs", 3, "--loader", *loader, "--results-dir", tmp_path, ranks=2)
    )
    rows = rows_of(tmp_path)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert (row["stage"], row["dataset"], row["model"]) == ("tables", "random tables", "Tables")
        assert (row["precision"], row["images"], row["test_images"]) == ("fp32", 2000, 500)
    assert 0 < rows[-1]["train_loss"] < rows[0]["train_loss"] < 3
    assert rows[-1]["test_accuracy"] > 80  # chance is below 50


@pytest.mark.parametrize("line", [1, 2], ids=["sum", "mean"])
def test_a_loss_that_is_a_sum_trains_alike_on_two_ranks(line: int, script: Script, tmp_path: Path) -> None:
    """With either of the lines of the page."""
    page = (REPOSITORY / "03_multigpu_ddp" / "OUR_LOOP.md").read_text().replace("inputs)", "images)")
    code = re.search(r"```python\n(loss = .*?)```", page.replace("targets,", "labels,"), re.DOTALL)[1]
    text = own_training(REGRESS).replace("nn.BatchNorm1d(64), ", "")
    mean_loss = "                loss = F.mse_loss(model(images), labels)\n"
    lines = [f"                {code.splitlines()[number]}\n" for number in (0, line)]
    assert mean_loss in text and 'reduction="sum"' in lines[0]
    (own_script := tmp_path / "sum.py").write_text(text.replace(mean_loss, "".join(lines)))
    for ranks in (1, 2):
        options = (*SMALL, "--recipe", "sgd", "--lr", 1e-4, "--results-dir", tmp_path / str(ranks))
        assert "accuracy" not in succeeded(script(own_script, *options, ranks=ranks)).stdout
        assert all(pd.isna(row["test_accuracy"]) for row in rows_of(tmp_path / str(ranks)))
    two, alone = ([row["test_loss"] for row in rows_of(tmp_path / str(ranks))] for ranks in (2, 1))
    assert two == pytest.approx(alone, rel=1e-5)


RESIDENT = "--loader resident keeps tensors on the device, but these samples are read one by one"
NO_TEST = "--stop-at and --patience go by a test, and this training has none"
BELOW_0 = "the schedule's learning rate for epoch 2 is -0.1: correct it."
LEFT = "epoch 1 was left early, or not trained: end the loop over run.steps"
NAMES = "run.log got loss, 0, and then loss, 1: give it the same names in every step"


@pytest.mark.parametrize(
    ("change", "arguments", "sentence"),
    [
        (
            ("run.log(loss=loss)", "pass"),
            SMALL,
            "0 losses after 1 steps: call run.log(",
        ),
        (("run.log(loss=loss)", "run.log(loss=loss); break"), SMALL, LEFT),
        (("", ""), (*OF_STORIES, "--loader", "resident"), RESIDENT),
        (("", ""), (*OF_STORIES, "--patience", 1), NO_TEST),
        (("critic_loss=of_critic", "**{str(step): 1}"), OF_STORIES, NAMES),
        (('"critic_optimizer"', '"optimizer"'), OF_STORIES, "`extra_state` has the name optimizer, as any"),
        (
            ("run.end_of_epoch(epoch)", "[run.end_of_epoch(epoch) for _ in '12']"),
            OF_STORIES,
            "epoch 1 was left",
        ),
        (("run.end_of", "first.param_groups[0]['lr'] = -0.1; run.end_of"), OF_STORIES, BELOW_0),
        (("run.epochs()", "(2, 1)"), OF_STORIES, "epoch 2 in place of 1: take the epochs of run.epochs()"),
        (
            ("first, None,", "first, None, devices=0,"),
            OF_STORIES,
            "the devices cannot be recorded ('0' is not a whole number",
        ),
    ],
    ids=[
        "loss not told",
        "loop left",
        "resident",
        "no test",
        "names",
        "taken",
        "twice",
        "learning rate",
        "epochs",
        "no device",
    ],
)
def test_a_mistake_in_a_copied_stage_is_one_sentence(
    change: tuple, arguments: tuple, sentence: str, script: Script, tmp_path: Path
) -> None:
    own_script = tmp_path / "own.py"
    text = STORIES if 8 in arguments else own_training(CLASSIFY)
    own_script.write_text(text.replace(*change))
    done = script(own_script, *arguments, "--results-dir", tmp_path, ranks=1)
    assert one_error(done).startswith(f"error on rank 0: {sentence}")


def test_a_data_set_that_loader_processes_cannot_get(script: Script, tmp_path: Path) -> None:
    """Where a fork server starts them, as by default in Python 3.14. PyTorch adds a warning."""
    first = "    opts = parse_"
    by_a_fork_server = "    torch.multiprocessing.set_start_method('forkserver', force=True)\n"
    with_a_lambda = "    Stories.__init__ = lambda self: setattr(self, 'noise', lambda: 0)\n"
    own_script = tmp_path / "own.py"
    own_script.write_text(STORIES.replace(first, f"{by_a_fork_server}{with_a_lambda}{first}"))
    done = script(own_script, *OF_STORIES, "--num-workers", 1, "--results-dir", tmp_path)
    assert "error: the data set cannot be sent to the processes" in failed(done)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("before", "line", "expected"),
    [
        ("opts = ", "sys.argv += ['--lr', os.environ['RANK'] + '.1']", "different --lr: start all"),
        (
            "opts = ",
            "sys.argv += ['--recipe', 'fast'] * int(os.environ['RANK'])",
            "different --recipe, ",
        ),
        (
            "run = Run",
            "Stories.name = f'stories {dist_env.rank}'",
            "different --dataset: start all ranks alike.",
        ),
        (
            "model, second",
            "reader = nn.GRU(2, 3 + dist_env.rank)",
            "the ranks have networks of different sizes",
        ),
    ],
    ids=["lr", "recipe", "dataset", "width"],
)
def test_ranks_with_other_options_do_not_train_together(
    before: str, line: str, expected: str, script: Script, tmp_path: Path
) -> None:
    own_script = tmp_path / "own.py"
    own_script.write_text(STORIES.replace(f"    {before}", f"    import sys; {line}\n    {before}"))
    errors = failed(script(own_script, *OF_STORIES, "--results-dir", tmp_path, ranks=2))
    assert expected in errors


def test_ranks_that_note_other_numbers_are_told(script: Script, tmp_path: Path) -> None:
    own_script, noted = tmp_path / "own.py", "critic_loss=of_critic"
    own_script.write_text(
        STORIES.replace(noted, f"**({{}} if dist_env.rank else {{'{noted[:11]}': of_critic}})")
    )
    error = failed(script(own_script, *OF_STORIES, "--results-dir", tmp_path, ranks=2))
    assert "the ranks give run.log other names: give it the same on all of them." in error


def test_weights_with_a_state_of_another_type_are_saved_at_the_end(script: Script, tmp_path: Path) -> None:
    """A checkpoint refuses it, as it could not resume from it; what was trained is not lost for that."""
    own_script, extra = (
        tmp_path / "own.py",
        "get_extra_state = lambda self: Extra(); set_extra_state = lambda self, _: None",
    )
    text = own_training(CLASSIFY).replace(
        "class Tables(nn.Sequential):", f"class Extra: pass\n\n\nclass Tables(nn.Sequential):\n    {extra}"
    )
    own_script.write_text(text)
    arguments = (own_script, *SMALL, "--results-dir", tmp_path)
    error = one_error(script(*arguments, "--checkpoint-dir", tmp_path / "checkpoints", ranks=1))
    assert "model['_extra_state'] is a Extra" in error
    succeeded(script(*arguments, "--save-model", ranks=1))
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".pt"]


def test_an_optimizer_whose_state_is_split_over_the_ranks(script: Script, tmp_path: Path) -> None:
    """It trains as one that is whole, and is saved as such. test_own_loop.py resumes with one."""
    own_script, whole = tmp_path / "own.py", "torch.optim.AdamW(second.parameters(), lr=0.1)"
    zero = "torch.distributed.optim.ZeroRedundancyOptimizer(second.parameters(), torch.optim.AdamW, lr=0.1)"
    text, losses = STORIES.replace("import os,", "import torch.distributed.optim, os,"), []
    for optimizer, folders in ((whole, ()), (zero, ()), (zero, ("--checkpoint-dir", tmp_path / "saved"))):
        results = tmp_path / str(len(losses))
        own_script.write_text(text.replace(whole, optimizer))
        succeeded(script(own_script, *OF_STORIES, "--results-dir", results, *folders, ranks=2))
        (path,) = (results / "runs").glob("*.csv")
        losses.append([row["value"] for row in records.read_metrics(path) if row["metric"] == "critic_loss"])
    assert len(losses[0]) == 2 and losses[0] == losses[1] == losses[2]
    assert list((tmp_path / "saved").glob("*.pt"))
    sharded = "__import__('manygpus.checkpoint.sharded').checkpoint.sharded.Sharded(second, other)"
    own_script.write_text(
        text.replace(whole, zero).replace("    run.resume()", f"    {sharded}\n    run.resume()")
    )
    error = failed(script(own_script, *OF_STORIES, "--results-dir", tmp_path, ranks=2))
    assert "error on rank 0: Sharded cannot save a ZeroRedundancyOptimizer" in error


def test_what_else_a_training_has_comes_back_after_a_stop(script: Script, tmp_path: Path) -> None:
    """Second networks and optimizers, what differs by rank, and the sums of numbers of its own."""
    own_script, recorded = tmp_path / "stories.py", {}
    own_script.write_text(STORIES)
    for name, stop in (("whole", ""), ("stopped", "1 2")):
        arguments = (own_script, *OF_STORIES, *places(tmp_path / name))
        done = succeeded(script(*arguments, ranks=2, env={"STOP": stop}))
        if stop:
            assert "stopped after step 3 of epoch 1" in done.stdout
            for left_out, sentence in (
                ("nothing", "each of its 2 ranks has its own state: start as many ranks"),
                (', "critic_optimizer": other', "was made with the critic_optimizer AdamW"),
                ('"per_rank_state": per_rank_state, ', "it has a state of each rank"),
            ):
                own_script.write_text(STORIES.replace(left_out, ""))
                assert sentence in one_error(script(*arguments, ranks=1))
            own_script.write_text(STORIES)
            done = succeeded(script(*arguments, ranks=2))
        assert re.search(r"^epoch 2/2: train loss \S+, \S+ words/s, \S+ s$", done.stdout, re.MULTILINE)
        rows = rows_of(tmp_path / name)
        (path,) = (tmp_path / name / "runs").glob("*.csv")
        metrics = [metric for metric in records.read_metrics(path) if metric["metric"] != "words_per_s"]
        assert [metric["metric"] for metric in metrics] == ["critic_loss"] * 2
        recorded[name] = [row["train_loss"] for row in rows] + [metric["value"] for metric in metrics]
        assert {(row["test_images"], row["parameters"], row["lr"]) for row in rows} == {(0, 63 + 4, 0.1)}
        (words,) = {row["optimizer"] for row in rows}
        assert re.fullmatch(r"SGD momentum=0 .* \+ AdamW betas=0.9,0.999 .*", words)
    assert recorded["stopped"] == recorded["whole"]


def test_another_optimizer_or_schedule_does_not_resume_and_a_mode_of_one_does(
    script: Script, tmp_path: Path
) -> None:
    """The mode is True within an epoch, and False when the optimizer is made."""
    text = STORIES.replace("\n@errors.entrypoint\ndef main():", WITH_A_MODE).replace(
        "torch.optim.AdamW(second", "Averaging(second"
    )
    text = text.replace("first, None,", "first, torch.optim.lr_scheduler.StepLR(first, 100),")
    (own_script := tmp_path / "own.py").write_text(text)
    losses = {}
    for name, stop in (("whole", ""), ("stopped", "0 2")):
        arguments = (own_script, *OF_STORIES, *places(tmp_path / name))
        done = succeeded(script(*arguments, ranks=1, env={"STOP": stop}))
        if stop:
            assert "stopped after step 3 of epoch 1" in done.stdout
            for before, after, part in (
                ("__init__(weights, lr)\n", "__init__(weights, lr, amsgrad=True)\n", "critic_optimizer"),
                ("(weights, lr)\n", "(weights, lr, weight_decay=0.1)\n", "critic_optimizer"),
                ("torch.optim.SGD(", "torch.optim.Adam(", "optimizer"),
                ("StepLR(first, 100)", "ExponentialLR(first, 0.5)", "lr_scheduler"),
            ):
                own_script.write_text(text.replace(before, after))
                assert f"was made with the {part} " in one_error(script(*arguments, ranks=1))
            own_script.write_text(text)
            succeeded(script(*arguments, ranks=1))
        losses[name] = [row["train_loss"] for row in rows_of(tmp_path / name)]
    assert losses["stopped"] == losses["whole"]


def test_what_loader_processes_draw_is_the_same_after_a_stop(script: Script, tmp_path: Path) -> None:
    """Whichever library a sample uses, in each epoch other numbers, and however many the processes are."""
    noise = "torch.randn(3 + index % 5, 2) + random.random() + np.random.rand()"
    text = STORIES.replace("torch.randn(3 + index % 5, 2)", noise).replace("import os,", "import random, os,")
    (own_script := tmp_path / "own.py").write_text(
        text.replace("from torch import", "import numpy as np\nfrom torch import")
    )
    losses = {}
    for name, starts in {
        "whole": [("", 2, "2")],
        "within": [("0 2", 2, "2"), ("", 1, "2")],
        "between": [("", 2, "1"), ("", 2, "2")],
    }.items():
        for stop, workers, epochs in starts:
            arguments = ("--num-workers", workers, *OF_STORIES, "--epochs", epochs, *places(tmp_path / name))
            done = succeeded(script(own_script, *arguments, ranks=1, env={"STOP": stop}))
            assert ("stopped after step 3 of epoch 1" in done.stdout) == bool(stop)
        losses[name] = [row["train_loss"] for row in rows_of(tmp_path / name)]
    assert losses["within"] == losses["between"] == losses["whole"]


def test_the_numbers_of_loader_processes_differ_by_epoch() -> None:
    opts = parse_options("", arguments=["--batch-size", "4", "--loader", "workers", "--num-workers", "1"])
    made = train_loader(Noise(), opts, DistEnv(device=torch.device("cpu")))
    drawn = []
    for epoch in (1, 2, 1):
        made.set_epoch(epoch)
        drawn += [batch.flatten().tolist() for batch in made]
    assert drawn[0] == drawn[2] and not {*drawn[0]} & {*drawn[1]}


class Noise:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


def test_resuming_takes_little_more_memory_than_what_was_saved(script: Script, tmp_path: Path) -> None:
    """On each rank: 48 MB, of which 32 are then the optimizer's."""
    (own_script := tmp_path / "own.py").write_text(LARGE)
    printed = ""
    for epochs in (1, 2):
        arguments = (own_script, "--epochs", epochs, "--batch-size", 4, *places(tmp_path))
        printed = succeeded(script(*arguments, ranks=2)).stdout
    took = re.findall(r"rank \d took (\d+) MB", printed)
    assert len(took) == 2 and all(40 < int(mb) < 1.5 * 48 for mb in took)
    first, second = re.findall(r"ends with (\S+)", printed)
    assert first == second
    assert len(rows_of(tmp_path)) == 2


def test_loader_processes_of_two_ranks_draw_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    opts = parse_options("", arguments=["--batch-size", "4", "--loader", "workers", "--num-workers", "2"])
    drawn = []
    for rank in (0, 1, 1):
        monkeypatch.setattr(process_group, "rank", lambda rank=rank: rank)
        (batch,) = train_loader(Noise(), opts, DistEnv(device=torch.device("cpu")))
        drawn.append(batch.flatten().tolist())
    assert drawn[1] == drawn[2] and not {*drawn[0]} & {*drawn[1]}


def test_noise_is_new_in_every_step() -> None:
    opts, dist_env = parse_options("", arguments=["--batch-size", "4"]), DistEnv(device="cpu")
    steps = [
        SimpleNamespace(options=opts, dist_env=dist_env, _noise=generator(0, -step)) for step in (1, 2, 2)
    ]
    drawn = [Run.noise(step, 2) for step in steps]
    assert drawn[0].shape == (4, 2) and drawn[1].equal(drawn[2]) and not drawn[0].eq(drawn[1]).any()
    assert not Run.noise(steps[1], 2).eq(drawn[1]).any()


def test_it_is_compared_apart_from_mnist(script: Script, tmp_path: Path) -> None:
    (own_script := tmp_path / "tables.py").write_text(own_training(CLASSIFY))
    for ranks in (1, 2):
        succeeded(script(own_script, *SMALL, "--results-dir", tmp_path, ranks=ranks))
    assert "tables on 2 CPU workers trained" in report([tmp_path / "runs"], tmp_path / "out")
    table = pd.read_csv(tmp_path / "out" / "comparison.csv")
    assert list(zip(table.stage, table.devices, table.model, strict=True)) == [
        ("tables", 1, "Tables"),
        ("tables", 2, "Tables"),
    ]
    assert table.speedup.notna().all()

    mnist = REPOSITORY / "results" / "sample" / "cpu-2-cores" / "runs.csv"
    both, alone = (
        comparison.compare(comparison.summarize(comparison.load_some(paths)[0]))
        for paths in ([tmp_path / "runs", mnist], [mnist])
    )
    assert both[both.model == "Net"].speedup.dropna().tolist() == alone.speedup.dropna().tolist()
    assert set(both[both.model == "Tables"].baseline) == {"tables"}
