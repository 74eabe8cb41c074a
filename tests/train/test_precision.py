"""What the layers compute in: TF32 is set and recorded, and "auto" times steps of the training itself."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkout import Checkout
from conftest import one_error, places, rows_of, succeeded
from torch import nn

from trainkit.config.options import Options
from trainkit.data import datasets as data
from trainkit.distributed import process_group
from trainkit.errors import UserError
from trainkit.training import clock, precision
from trainkit.training.model import Net
from trainkit.training.precision import choose_precision, precision_of

pytestmark = pytest.mark.filterwarnings("error")  # of PyTorch's two ways to switch TF32
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Has every network stand on a GPU of this compute capability, as far as precision.py asks."""

    def make(capability: tuple[int, int], rocm: str | None = None) -> None:
        monkeypatch.setattr(precision, "_device", lambda network: GPU)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        with_bf16 = capability >= (8, 0) or bool(rocm)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: with_bf16)
        monkeypatch.setattr(torch.version, "hip", rocm)

    yield make
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("network", [Net, lambda: nn.Linear(4, 4)], ids=["Net", "no attribute"])
def test_tf32_is_set_for_all_layers_and_recorded(network: Callable, gpu: Callable) -> None:
    """Whatever was set before: PyTorch's own default is fp32 in linear layers and TF32 in convolutions."""
    gpu((8, 0))
    model = network()
    names = ["fp32", "tf32", "fp32"] + ["bf16", "tf32", "bf16"] * isinstance(model, Net)
    for name in names:
        torch.backends.cudnn.allow_tf32 = name != "tf32"
        choose_precision(model, Options(precision=name), None)
        allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        assert (precision_of(model), *allowed) == (name, name == "tf32", name == "tf32")


@pytest.mark.parametrize(
    ("where", "network", "sentence"),
    [
        (None, Net, r"needs an NVIDIA GPU of compute capability 8.0 or newer \(A100, H100\), not CPU: "),
        (((7, 5),), Net, "not a GPU: use such a GPU, or another --precision."),
        (((9, 4), "6.4"), Net, "not a GPU: "),
        (
            ((9, 0),),
            lambda: nn.Linear(4, 4).double(),
            "^Linear computes in fp64 only: leave out --precision tf32",
        ),
    ],
    ids=["CPU", "older GPU", "ROCm", "fp64"],
)
def test_tf32_where_there_is_none_is_one_sentence(
    where: tuple | None, network: Callable, sentence: str, gpu: Callable
) -> None:
    if where:
        gpu(*where)
    with pytest.raises(UserError, match=sentence):
        choose_precision(network(), Options(precision="tf32"), None)


@pytest.mark.parametrize(
    ("where", "network", "names"),
    [
        (((9, 0),), Net, ["tf32", "bf16"]),
        (((7, 5),), Net, ["fp32"]),
        (((9, 4), "6.4"), Net, ["fp32", "bf16"]),
        (((9, 0),), lambda: nn.Linear(4, 4), ["tf32"]),
        (((9, 0),), lambda: nn.Linear(4, 4).bfloat16(), ["bf16"]),
        (None, Net, ["fp32", "bf16"]),
        (None, lambda: nn.Linear(4, 4), ["fp32"]),
    ],
)
def test_auto_chooses_from_what_the_device_has(
    where: tuple | None, network: Callable, names: list[str], gpu: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where:
        gpu(*where)
    compared = []
    monkeypatch.setattr(precision, "_worth_its_loss", lambda names, *_: compared.extend(names) or names[-1])
    model = network()
    choose_precision(model, Options(), data.Split("made up", torch.zeros(1), torch.zeros(1)))
    assert compared == (names if len(names) > 1 else [])  # one is taken without a trial
    assert precision_of(model) == names[-1]


class Watched(nn.Sequential):
    """A network that records what it and its copies are asked to do."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 2), nn.Dropout(0.5))
        self.precision, Watched.seen = "fp32", []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.precision, len(x), self.training, tuple(self[0].weight.flatten().tolist())))
        return super().forward(x)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ([(0.09, 0.01), *[(0.02, 0.01)] * 3], "bf16"),
        ([(0.09, 0.01), *[(0.0111, 0.01)] * 3], "bf16"),
        ([(0.01, 0.09), *[(0.02, 0.01)] * 3], "bf16"),  # the first turn is a warm-up
        ([(0.09, 0.01), (0.02, 0.01), (0.02, 0.01), (0.0109, 0.01)], "fp32"),  # it was noise before
        ([(0.09, 0.01), *[(0.01, 0.02)] * 3], "fp32"),
    ],
)
def test_auto_times_training_steps_of_this_run(
    seconds: list[tuple[float, float]], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes bf16 if that is faster by 10 % in each of its turns, else what is more exact."""
    torch.manual_seed(1)
    model = Watched()
    measured = (moment for turn in seconds for moment in turn)
    monkeypatch.setattr(clock, "stop", lambda *_: next(measured))
    train_set = data.Split("noise", torch.randn(10, 4), torch.zeros(10))
    before, random_numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    choose_precision(model, Options(batch_size=24, lr=1.0), train_set)
    assert [seen[:3] for seen in model.seen] == [("fp32", 24, True), ("bf16", 24, True)] * 4
    assert len({weights for *_, weights in model.seen}) == 8  # each after a step of the optimizer
    assert precision_of(model) == chosen
    # Nothing of it is left.
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert all(weights.grad is None for weights in model.parameters())
    assert all(torch.equal(weights, before[name]) for name, weights in model.state_dict().items())


@pytest.mark.parametrize("kind", ["DDP", "DataParallel"])
def test_the_batch_of_the_trial_is_that_of_one_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = inner = Watched()
    if kind == "DDP":
        monkeypatch.setattr(process_group, "count", lambda: 3)
    else:
        model = nn.DataParallel(inner)
        model.device_ids = [0, 1, 2]
    choose_precision(
        model, Options(batch_size=24, lr=1.0), data.Split("noise", torch.randn(10, 4), torch.zeros(10))
    )
    assert {inputs for _, inputs, *_ in inner.seen} == {8}


@pytest.mark.full
def test_a_run_goes_on_with_tf32_or_says_that_it_cannot(script: Callable, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "a checkout")
    plain = checkout.script("single").read_text()
    checkout.plant(
        "single",
        """
        from trainkit.training import precision

        def show():
            print((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))

        precision.has_tf32 = bool
        faults.after_epoch(1, show)
        """,
    )
    small = (*places(tmp_path), "--train-size", 128, "--test-size", 50, "--width", 4)
    for arguments in (("--epochs", 1, "--precision", "tf32"), ("--epochs", 2)):
        done = succeeded(script(checkout.script("single"), *small, *arguments))
        assert "\n(True, True)\n" in done.stdout
    assert [row["precision"] for row in rows_of(tmp_path)] == ["tf32", "tf32"]

    checkout.script("single").write_text(plain)
    told = one_error(script(checkout.script("single"), *small, "--epochs", 3))
    assert told.startswith("error: --precision tf32 needs an NVIDIA GPU")
