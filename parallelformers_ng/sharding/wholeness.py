"""Decides whether a module of a sharded model gives a complete result if the caller calls the module alone.

For most modules the plan decides. For other modules the ranks compare their results: a complete result is the same on
all ranks.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.stored import StoredInParts
from parallelformers_ng.sharding.tensors import is_within


class Alone(Enum):
    """Whether a module that the caller calls alone returns its whole result, or each rank only a part of it."""

    WHOLE = auto()
    PART = auto()
    UNSURE = auto()
    """The plan does not tell, because the module both splits and sums results; the ranks compare their results."""


def alone(plan: ShardPlan, path: str) -> Alone:
    cut = [layer for layer in plan.layers if is_within(layer.path, path)]
    layers = [layer for layer in cut if layer.cls is not StoredInParts]  # StoredInParts layers return whole results
    whole = [layer.path for layer in layers if not layer.takes_part and not layer.gives_part]
    here = [layer for layer in layers if layer.path == path]
    if here and whole.count(path) == len(here):
        return Alone.WHOLE
    inside = [layer for layer in layers if not any(is_within(layer.path, each) for each in whole)]
    if not inside and not _cut_outside_layers(plan, path, [layer.path for layer in cut]):
        return Alone.WHOLE
    opens = any(layer.gives_part and not layer.takes_part for layer in inside)
    closes = any(layer.takes_part and not layer.gives_part for layer in inside)
    return Alone.UNSURE if opens and closes else Alone.PART


_SAMPLE = 4096  # number of elements of a tensor that the ranks compare, to save time
_TOLERANCE = 1e-3


def check_is_whole(output: Any, communicator: Communicator, path: str) -> None:
    """Raise ParallelError if a module's results differ between ranks, because then each rank has only a part.

    A collective. About 4096 numbers of each tensor are compared, with a relative tolerance of 1e-3.
    """
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return
    digests = torch.stack([_digest(tensor) for tensor in tensors])
    # The ranks compare how many tensors they have first, because `all_gather` needs equal shapes.
    size = torch.tensor([float(digests.shape[0])], device=digests.device)
    sizes = communicator.all_gather(size)
    same = bool((sizes == sizes[0]).all())
    if same:
        gathered = communicator.all_gather(digests, 0).unflatten(0, (communicator.world_size, -1))
        same = torch.allclose(gathered, gathered[:1].expand_as(gathered), rtol=_TOLERANCE, atol=0)
    if not same:
        raise ParallelError(part_refusal(path))


def part_refusal(path: str) -> str:
    return (
        f"{path} is cut: called alone it would take or give only each worker's part of a result. Call a module above"
        f" {path}, or deparallelize() first"
    )


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return four numbers that stand for a tensor when ranks compare it: its size, and three sums of a sample: of
    absolute values, of squares, and of absolute values weighted by position."""
    sample = tensor.detach().flatten()[:: max(1, tensor.numel() // _SAMPLE)]
    sizes = sample.abs().float().nan_to_num(0.0, 0.0)
    order = torch.linspace(0.5, 1.5, sizes.numel(), device=sizes.device)
    count = sizes.new_tensor(tensor.numel())
    return torch.stack([count, sizes.sum(), sizes.square().sum(), (sizes * order).sum()])


def _cut_outside_layers(plan: ShardPlan, path: str, layers: list[str]) -> bool:
    return any(
        not tensor.is_replicated and not any(is_within(name, layer) for layer in layers)
        for name, tensor in plan.tensors.items()
        if name.startswith(f"{path}.")
    )
