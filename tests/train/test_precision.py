"""What the layers compute in is set and recorded; the tool that times each precision."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkout import Checkout
from conftest import REPOSITORY, STAGES, one_error, places, rows_of, succeeded
from torch import nn

from manygpus.errors import UserError
from manygpus.network.model import Net
from manygpus.training.precision import precision_of, set_float32_precision

pytestmark = pytest.mark.filterwarnings("error")  # of PyTorch's two ways to switch TF32
GPU = torch.device("cuda", 0)
WHICH_PRECISION = REPOSITORY / "01_singlegpu" / "which_precision.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Has `GPU` be one of this compute capability."""

    def make(capability: tuple[int, int], rocm: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setattr(torch.version, "hip", rocm)

    yield make
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def test_tf32_is_set_for_all_layers_and_recorded(gpu: Callable) -> None:
    """Whatever was set before: PyTorch's own default is fp32 in linear layers and TF32 in convolutions."""
    gpu((8, 0))
    for name in ("fp32", "tf32", "fp32", "bf16", "tf32", "bf16"):
        torch.backends.cudnn.allow_tf32 = name != "tf32"
        set_float32_precision(name, GPU)
        assert torch.backends.cuda.matmul.allow_tf32 == (name == "tf32")
        assert torch.backends.cudnn.allow_tf32 == (name == "tf32")
        assert precision_of(Net(), name) == name


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        (None, r"needs an NVIDIA GPU of compute capability 8.0 or newer \(A100, H100\), not CPU: "),
        (((7, 5),), "not a GPU: use such a GPU, or a different --precision."),
        (((9, 4), "6.4"), "not a GPU: "),
    ],
    ids=["CPU", "older GPU", "ROCm"],
)
def test_tf32_where_there_is_none_is_one_sentence(where: tuple | None, sentence: str, gpu: Callable) -> None:
    if where:
        gpu(*where)
    with pytest.raises(UserError, match=sentence):
        set_float32_precision("tf32", GPU if where else torch.device("cpu"))


@pytest.mark.parametrize(
    ("arguments", "has_units", "precision"),
    [
        ((), True, "fp32"),
        (("--recipe", "fast"), True, "bf16"),
        (("--recipe", "fast"), False, "fp32"),
        (("--recipe", "fast", "--precision", "fp32"), True, "fp32"),
    ],
    ids=["classic", "fast", "fast without units", "fast as told"],
)
def test_recipe_fast_takes_bf16_where_the_device_has_units_for_it(
    arguments: tuple[str, ...], has_units: bool, precision: str, tmp_path: Path, script: Callable
) -> None:
    """In the training, and in what is recorded of it."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags : fpu avx512f{' amx_bf16' if has_units else ''}\n\nflags : none\n")
    look = f"from manygpus import devices; devices.CPUINFO = devices.Path({str(cpuinfo)!r})"
    tell = "print('autocast:', torch.is_autocast_enabled('cpu'))"
    text = STAGES["single"].read_text()
    for old, new in (
        ("opts = parse", f"{look}\n    opts = parse"),
        ("            with autocast:\n", f"            with autocast:\n                {tell}\n"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "told.py").write_text(text)
    small = ("--epochs", 1, "--train-size", 64, "--test-size", 64, "--batch-size", 64, "--width", 4)
    done = succeeded(script(tmp_path / "told.py", *small, *arguments, "--results-dir", tmp_path))
    assert f"autocast: {precision == 'bf16'}" in done.stdout
    assert {row["precision"] for row in rows_of(tmp_path)} == {precision}


@pytest.mark.parametrize(("weights", "recorded"), [(torch.float32, "bf16"), (torch.bfloat16, "bf16")])
def test_the_precision_of_autocast_or_of_the_weights_is_recorded(weights: torch.dtype, recorded: str) -> None:
    assert precision_of(nn.Linear(4, 4).to(weights), "bf16") == recorded


def test_another_precision_than_that_of_the_weights_is_one_sentence() -> None:
    with pytest.raises(UserError, match="^Linear has weights in fp64: leave out --precision bf16"):
        precision_of(nn.Linear(4, 4).double(), "bf16")


def test_the_tool_times_what_the_device_has(script: Callable) -> None:
    done = succeeded(script(WHICH_PRECISION, "--batch-size", 8, "--width", 4, "--no-cuda"))
    _, *rows, advice = done.stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["fp32", "bf16"]
    assert all(float(row.split()[1]) > 0 for row in rows)
    assert "bf16" in advice or "fp32" in advice
    error = one_error(script(WHICH_PRECISION, "--precision", "bf16", "--no-cuda"))
    assert "--precision" in error


@pytest.mark.full
def test_a_run_resumes_with_tf32_or_says_that_it_cannot(script: Callable, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "a checkout")
    plain = checkout.script("single").read_text()
    checkout.plant(
        "single",
        """
        from manygpus.devices import Cpu

        def show():
            print((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))

        Cpu.supports_tf32 = lambda self, device: True
        faults.after_epoch(1, show)
        """,
    )
    small = (*places(tmp_path), "--train-size", 128, "--test-size", 50, "--width", 4)
    for epochs in (1, 2):
        done = succeeded(script(checkout.script("single"), *small, "--precision", "tf32", "--epochs", epochs))
        assert "\n(True, True)\n" in done.stdout
    assert [row["precision"] for row in rows_of(tmp_path)] == ["tf32", "tf32"]

    checkout.script("single").write_text(plain)
    error = one_error(script(checkout.script("single"), *small, "--precision", "tf32", "--epochs", 3))
    assert error.startswith("error: --precision tf32 needs an NVIDIA GPU")
