"""Find ranks that each train a network of their own, where all should train one."""

import torch
from torch import nn

from trainkit.distributed import process_group
from trainkit.errors import UserError
from trainkit.training.model import unwrapped
from trainkit.training.weights import is_in_earlier_fsdp, is_sharded

PARTS = 16  # of each tensor of weights, whose sums are compared
# As a share of what an epoch has changed. Ranks on different kinds of GPUs differ by rounding only.
EQUAL = 1e-3


class Drift:
    """Tells after some steps whether the ranks have trained the same weights; every rank creates one before.

    Networks that fully_shard or a tensor-parallel layer has split are left out, and those whose layers differ
    between the ranks.
    """

    def __init__(self, networks: list[nn.Module]) -> None:
        self._networks = [unwrapped(network) for network in networks if process_group.count() > 1]
        self._before = [_sums(network) for network in self._networks]

    def check(self) -> None:
        """Compare the weights of the ranks; every rank calls it.

        Raises:
            UserError: if those of a network have changed, and no tensor of them in the same way on all ranks.
                One is enough: of experts, and of layers that are split by hand, the others differ rightly.
        """
        for network, before in zip(self._networks, self._before, strict=True):
            # A script may have begun to train more of them since.
            after = {name: sums for name, sums in _sums(network).items() if name in before}
            alike = _alike(after, process_group.broadcast(after), before)
            of_tensors = zip(*process_group.gather(alike), strict=False)
            # A tensor of which no rank knows more than None tells nothing.
            changed = [of_ranks for of_ranks in of_tensors if set(of_ranks) != {None}]
            if changed and not any(set(of_ranks) <= {True, None} for of_ranks in changed):
                kind = type(network).__name__
                raise UserError(
                    f"each of the {process_group.count()} ranks has trained a {kind} of its own, as nothing "
                    "has averaged their gradients: train through DistributedDataParallel(model), or through "
                    "what Accelerate's prepare or Fabric's setup returns (on CPUs: Accelerator(cpu=True)). "
                    "If they are to differ, give Run per_rank_state, or Recorder weights_differ=True."
                )


def _alike(
    sums: dict[str, torch.Tensor], sums_of_rank_0: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> list[bool | None]:
    """Return for each tensor whether it has changed as on rank 0.

    None stands for a tensor that has not changed, or that is no longer numbers: a training that diverges does
    so on all ranks. The list is empty if rank 0 has other tensors, with which nothing can be compared.
    """
    if _sizes(sums) != _sizes(sums_of_rank_0):
        return []
    has_changed_alike: list[bool | None] = []
    for name, sums_of_tensor in sums.items():
        change = (sums_of_tensor - before[name]).norm()
        if change == 0 or not change.isfinite():
            has_changed_alike.append(None)
        else:
            difference = (sums_of_tensor - sums_of_rank_0[name]).norm()
            has_changed_alike.append(bool(difference <= EQUAL * change))
    return has_changed_alike


def _sizes(sums: dict[str, torch.Tensor]) -> list[tuple[str, int]]:
    return [(name, len(sums_of_tensor)) for name, sums_of_tensor in sums.items()]


@torch.no_grad()
def _sums(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return the sums of `PARTS` parts of each tensor that is trained; none of a network that is split."""
    if is_in_earlier_fsdp(network):
        return {}
    sums = {}
    for name, weights in network.named_parameters():
        if weights.requires_grad and weights.numel() and not is_sharded(weights):
            parts = weights.detach().reshape(-1).chunk(PARTS)  # one by one: a GPU may have no room for more
            sums[name] = torch.stack([part.double().sum() for part in parts]).cpu()
    return sums
