"""The page on models that do not fit, and how DDP packs its gradients: what they say is measured here."""

import re
import subprocess
import sys

import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from trainkit.model import Net
from trainkit.workshop.ranks import in_ranks

PAGE = REPOSITORY / "03_multigpu_ddp" / "beyond" / "DOES_NOT_FIT.md"
WEIGHTS = 4 * 1_199_882  # bytes


def test_the_program_prints_what_the_page_says() -> None:
    program, printed = re.search(
        r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL
    ).groups()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.stdout == printed, done.stderr


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"\[(test_\w+)\]\((\S+?)\)", PAGE.read_text())
    assert len(named) >= 5
    for name, file in named:
        assert f"\ndef {name}(" in (PAGE.parent / file).read_text(), name


def of_ddp(rank: int, size: int) -> tuple[int, str]:
    """The bytes of the weights of a rank, and the sizes of its buckets."""
    model = torch.nn.parallel.DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    for _ in range(3):  # after the first step the buckets are made anew
        model(torch.rand(4, 1, 28, 28)).sum().backward()
    held = sum(weights.untyped_storage().nbytes() for weights in model.parameters())
    return held, model._get_ddp_logging_data()["rebuilt_bucket_sizes"]


def of_sharding(rank: int, size: int) -> tuple[int, int, int]:
    """The bytes of the weights, of the gradients and of the optimizer's state of a rank."""
    model, mesh = Net(), init_device_mesh("cpu", (size,))
    for part in (model.conv1, model.conv2, model.fc1, model.fc2, model):
        fsdp.fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 1, 28, 28)).sum().backward()
    optimizer.step()
    state = [states[name] for states in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    tensors = (model.parameters(), (weights.grad for weights in model.parameters()), state)
    return tuple(sum(4 * tensor.to_local().numel() for tensor in kind) for kind in tensors)


def test_ddp_holds_all_on_every_rank_and_sharding_a_part() -> None:
    assert in_ranks(of_ddp) == 2 * [(WEIGHTS, "4724264, 75264")]
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("PyTorch before 2.6 has no fully_shard")
    assert in_ranks(of_sharding) == 2 * [(WEIGHTS / 2, WEIGHTS / 2, WEIGHTS)]
