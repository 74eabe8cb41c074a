"""DataParallel with two replicas, on the CPU: tests/around.py has what PyTorch has for GPUs only."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import around
import pytest
import torch
import torch.nn.functional as F
from checkout import Checkout
from conftest import places, rows_of, succeeded
from torch import nn

from manygpus.config.options import Options
from manygpus.data.datasets import InMemoryDataset
from manygpus.data.loaders import eval_loader
from manygpus.launchers import DistEnv
from manygpus.network.model import Net
from manygpus.network.optim import build_optimizer
from manygpus.training.evaluation import evaluate

LABELS = torch.arange(12) % 10


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> tuple[Net, nn.DataParallel]:
    """A network, and one of equal weights with two replicas."""
    around.pretend(2, monkeypatch.setattr)
    torch.manual_seed(1)
    plain = Net().to(memory_format=torch.channels_last)
    return plain, nn.DataParallel(copy.deepcopy(plain))


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(12, 1, 28, 28, generator=torch.Generator().manual_seed(1))


def backward(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    loss = F.nll_loss(model.eval()(images.to(memory_format=torch.channels_last)), LABELS)
    loss.backward()
    return loss


@pytest.mark.parametrize("recipe", ["classic", "fast"])
def test_a_step_with_gradients_of_other_strides(
    recipe: str, two: tuple, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs fused Adam of older releases refuses them; so does this one."""
    real = torch._fused_adam_

    def as_on_a_gpu(weights: list, gradients: list, *rest: object, **more: object) -> None:
        if [tensor.stride() for tensor in weights] != [tensor.stride() for tensor in gradients]:
            raise RuntimeError("params, grads, exp_avgs, and exp_avg_sqs must have same layout")
        real(weights, gradients, *rest, **more)

    monkeypatch.setattr(torch, "_fused_adam_", as_on_a_gpu)
    for model in two:
        optimizer, _ = build_optimizer(
            Options(batch_size=64, recipe=recipe, lr=0.01), model, steps_per_epoch=9
        )
        backward(model, images)
        optimizer.step()
    plain, parallel = two
    weights = parallel.module.conv1.weight
    assert (weights.stride(), weights.grad.stride()) == ((9, 1, 3, 1), (9, 9, 3, 1))
    for (name, weights), other in zip(plain.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(weights, other, rtol=1e-3, atol=1e-5, msg=name)


def test_dropout_and_no_grad_hold_in_every_thread(two: tuple, images: torch.Tensor) -> None:
    seen = []

    def thread() -> str:
        return threading.current_thread().name  # the number of one that has ended is given out again

    def look(layer: nn.Module, _: object, output: torch.Tensor) -> None:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            seen.append((thread(), output.dtype, output.requires_grad))
        if isinstance(layer, nn.Dropout):
            seen.append((thread(), layer.training and (output == 0).float().mean().item() > 0.2))

    _, parallel = two
    for layer in parallel.module.children():
        layer.register_forward_hook(look)
    assert parallel.train()(images).dtype == torch.float32
    threads = {entry[0] for entry in seen}
    assert len(threads) == 2 and thread() not in threads
    assert {entry[1:] for entry in seen} == {(torch.float32, True), (True,)}
    seen.clear()
    test_set = InMemoryDataset("noise", images, LABELS).first(3)
    test_batches = eval_loader(test_set, Options(test_batch_size=2), DistEnv(device=torch.device("cpu")))
    evaluate(parallel, test_batches, F.nll_loss)
    # The last batch is one image, for one replica, in the main thread.
    assert len({entry[0] for entry in seen}) == 3
    assert {entry[1:] for entry in seen} == {(torch.float32, False), (False,)}


def test_replicas_evaluate_as_one(two: tuple, images: torch.Tensor) -> None:
    test_set = InMemoryDataset("noise", images, LABELS)
    test_batches = eval_loader(test_set, Options(test_batch_size=5), DistEnv(device=torch.device("cpu")))
    of_one, of_two = (evaluate(model, test_batches, F.nll_loss) for model in two)
    assert of_two.samples == 12 and of_two.accuracy == of_one.accuracy
    assert of_two.loss == pytest.approx(of_one.loss)


@pytest.mark.parametrize(("recipe", "precision"), [("classic", "fp32"), ("fast", "fp32")])
def test_the_stage_trains_with_two_replicas(
    recipe: str, precision: str, script: Callable, tmp_path: Path, checkout: Checkout
) -> None:
    planted = f"sys.path.append({str(Path(__file__).parents[1])!r}); import around; gpus = around.pretend(2)"
    checkout.insert("dp", planted, before="if gpus > 1:")
    small = ("--epochs", 2, "--train-size", 960, "--test-size", 301, "--width", 8)
    chosen = ("--recipe", recipe, "--precision", precision, "--results-dir", tmp_path)
    succeeded(script(checkout.script("dp"), *small, *chosen))
    rows = rows_of(tmp_path)
    assert {(row["devices"], row["batch_per_device"], row["world_size"]) for row in rows} == {(2, 32, 1)}
    assert rows[1]["train_loss"] < rows[0]["train_loss"] and rows[1]["test_accuracy"] > 50


# As if there were so many GPUs with random numbers.
GENERATORS = """\
import types; from manygpus import devices as device; \
from manygpus.launchers import DistEnv
from manygpus.data.datasets import InMemoryDataset
from manygpus.data.loaders import eval_loader
states = [torch.full((1,), i, dtype=torch.uint8) for i in range(int(os.environ["GPUS"]))]; \
torch.cuda.is_initialized = lambda: True; torch.cuda.device_count = lambda: len(states); \
torch.cuda.get_rng_state_all = lambda: states; torch.cuda.reset_peak_memory_stats = lambda gpu: None; \
torch.cuda.default_generators = [types.SimpleNamespace(manual_seed=lambda seed: print("seeded", seed))]; \
device.try_gpu = lambda gpu: None; \
torch.cuda.set_rng_state_all = lambda states: print("restored", [state.item() for state in states])"""


def test_each_gpu_draws_its_own_random_numbers_after_a_stop_too(script: Callable, tmp_path: Path) -> None:
    """With as many GPUs as before they continue; with others each gets its own again, not all the same."""
    checkout = Checkout(tmp_path / "a checkout")
    checkout.plant("dp", GENERATORS)
    small = ("--train-size", 128, "--test-size", 50, "--precision", "fp32", "--seed", 7)
    lines = []
    for epochs, gpus in ((1, 2), (2, 2), (3, 3)):
        done = script(
            checkout.script("dp"), *small, *places(tmp_path), "--epochs", epochs, env={"GPUS": str(gpus)}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines.append([line for line in done.stdout.splitlines() if line.startswith(("seeded", "restored"))])
    assert lines == [["seeded 7"], ["seeded 7", "restored [0, 1]"], ["seeded 7", "seeded 3007"]]


def test_a_checkpoint_of_another_stage_keeps_the_kernels_of_this_one(
    script: Callable, tmp_path: Path, checkout: Checkout
) -> None:
    """Adam's state would bring fused kernels along, which DataParallel does without."""
    small = ("--train-size", 64, "--test-size", 50, "--precision", "fp32", "--recipe", "fast", "--epochs", 2)
    checkout.plant("single", "faults.before_step(1, lambda optimizer: faults.signal_itself(signal.SIGUSR2))")
    assert "stopped after" in script(checkout.script("single"), *small, *places(tmp_path)).stdout
    checkout.plant(
        "dp",
        """
        initialise = torch.optim.Optimizer.__init__

        def with_loops_over_all_weights(self, weights, defaults):
            initialise(self, weights, defaults | {"foreach": True, "fused": False})

        torch.optim.Optimizer.__init__ = with_loops_over_all_weights

        def show(optimizer):
            print([optimizer.param_groups[0][kind] for kind in ("foreach", "fused")])

        faults.after_step(1, show)
        """,
    )
    done = succeeded(script(checkout.script("dp"), *small, *places(tmp_path)))
    assert "\n[True, False]\n" in done.stdout
