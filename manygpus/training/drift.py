"""Find ranks that each train by themselves, where all should train one network, each with its own samples."""

import math
from functools import partial

import torch
from torch import nn

from manygpus.devices import accelerator_of
from manygpus.distributed import process_group
from manygpus.errors import UserError
from manygpus.network.model import unwrapped
from manygpus.network.rank_weights import is_in_earlier_fsdp, is_sharded

PARTS = 16  # of each tensor of weights, whose sums are compared
# As a share of what an epoch has changed. Ranks on different kinds of GPUs differ by rounding only.
EQUAL = 1e-3
GRADIENTS = 10  # of each tensor of weights, that are compared: a script may begin with steps on a fixed batch


class Drift:
    """Tells after some steps whether the ranks have trained the same weights, each with samples of its own.

    Every rank creates one before these steps. Networks that fully_shard or a tensor-parallel layer has split
    are left out, and those whose layers differ between the ranks.
    """

    def __init__(self, networks: list[nn.Module]) -> None:
        self._networks = [unwrapped(network) for network in networks if process_group.count() > 1]
        self._before = [_sums(network) for network in self._networks]
        # Ranks that split a network rightly have the same samples.
        is_split = any(map(_is_split, self._networks))
        self._gradients = _LocalGradients([] if is_split else self._networks)

    def check(self) -> None:
        """Compare the weights of the ranks, and their gradients; every rank calls it, once.

        Raises:
            UserError: if the weights of a network have changed, and no tensor of them in the same way on all
                ranks. One is enough: of experts, and of layers that are split by hand, the others differ
                rightly. Also if all have changed in the same way, by the same gradients on all ranks.
        """
        all_alike = True
        for network, before in zip(self._networks, self._before, strict=True):
            # A script may have begun to train more of them since.
            after = {name: sums for name, sums in _sums(network).items() if name in before}
            alike = _alike(after, process_group.broadcast(after), before)
            alike_by_tensor = zip(*process_group.gather(alike), strict=False)
            # A tensor of which no rank knows more than None tells nothing. Where only some ranks have changed
            # it, they have not trained together: seen, with `if rank == 0: optimizer.step()`.
            changed = [alike_on_ranks for alike_on_ranks in alike_by_tensor if set(alike_on_ranks) != {None}]
            changed_alike = [all(alike_on_ranks) for alike_on_ranks in changed]
            if changed and not any(changed_alike):
                kind = type(network).__name__
                raise UserError(
                    f"each of the {process_group.count()} ranks has trained a {kind} of its own, as nothing "
                    "has averaged their gradients, or not all of them step the optimizer: train through "
                    "DistributedDataParallel(model), or through what Accelerate's prepare or Fabric's setup "
                    "returns (on CPUs: Accelerator(cpu=True)), and call optimizer.step() on every rank. "
                    "If they are to differ, give Run per_rank_state, or Recorder weights_differ=True."
                )
            all_alike = all_alike and all(changed_alike)
        norms_of_ranks = process_group.gather(self._gradients.norms())
        # Seen: on CPUs, Accelerator() makes a process group and averages nothing. With the same seed, each
        # rank trained the same network with the same samples, which was recorded as the work of N devices.
        if all_alike and _are_equal(norms_of_ranks):
            raise UserError(
                f"all {process_group.count()} ranks have trained with the same samples, which is the work "
                "of one: give each rank its own, by DistributedSampler(dataset), or by what Accelerate's "
                "prepare or Fabric's setup_dataloaders returns (on CPUs: Accelerator(cpu=True)). If samples "
                "are drawn at random, seed each rank differently."
            )


class _LocalGradients:
    """The first gradients of networks that this rank has computed, before they are averaged over the ranks.

    Autograd calls these hooks before those by which DistributedDataParallel averages a gradient
    (https://docs.pytorch.org/docs/stable/notes/autograd.html#backward-hooks-execution).
    """

    def __init__(self, networks: list[nn.Module]) -> None:
        # Of all weights: a factor of a loss over the samples of all ranks, as CLIP has one, has the same
        # gradient on each of them. They stay on the device: reading one makes the CPU wait for it.
        weights_of_all = [weights for network in networks for weights in network.parameters()]
        trained = [weights for weights in weights_of_all if weights.requires_grad]
        self._norms: list[list[torch.Tensor]] = [[] for _ in trained]
        self._hooks = [
            weights.register_hook(partial(_note_norm, norms))
            for weights, norms in zip(trained, self._norms, strict=True)
        ]

    def norms(self) -> list[list[float]]:
        """Return the norms of the gradients of each tensor of weights, and note no more of them."""
        for hook in self._hooks:
            hook.remove()
        return [[norm.item() for norm in norms] for norms in self._norms]


def _note_norm(norms: list[torch.Tensor], gradient: torch.Tensor) -> None:
    if len(norms) < GRADIENTS and not accelerator_of(gradient.device).is_capturing():
        norms.append(gradient.detach().norm())


def _are_equal(norms_of_ranks: list[list[list[float]]]) -> bool:
    """Return whether all ranks had the same gradients, to the last digit.

    Those that are 0, or no numbers, tell nothing.
    """
    first, *others = norms_of_ranks
    are_known = any(0 < norm < math.inf for norms in first for norm in norms)
    return are_known and all(other == first for other in others)


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


def _is_split(network: nn.Module) -> bool:
    return is_in_earlier_fsdp(network) or any(map(is_sharded, network.parameters()))


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
