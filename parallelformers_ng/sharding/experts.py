"""Cuts mixtures of experts that are stacked in 3-D parameters: each rank holds a slice of the width of every expert."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import torch
from torch import nn

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.layers import ParallelLayer
from parallelformers_ng.sharding.linear import Reduced
from parallelformers_ng.sharding.partition import Range, has_groups, join, spread_aligned
from parallelformers_ng.sharding.policy import Rule


def has_experts_interface(module: nn.Module) -> bool:
    names = {name: p.ndim for name, p in module._parameters.items() if p is not None}
    stacked = names.get("down_proj") == 3 and 3 in (names.get("gate_up_proj"), names.get("up_proj"))
    arguments = {"hidden_states", "top_k_index", "top_k_weights"}
    return stacked and arguments <= inspect.signature(module.forward).parameters.keys()


def takes_experts_one_by_one(module: nn.Module) -> bool:
    """Return whether a module has stacked experts, and transformers' experts interface, which can loop over them.

    The interface sets `is_transposed`, the layout of the matrices, on its modules.
    """
    return hasattr(module, "is_transposed") and any(p is not None and p.ndim == 3 for p in module._parameters.values())


class OnFirstRank(ParallelLayer):
    """A layer without weights that returns zeros on all ranks but rank 0, so that a sum over the ranks adds it once."""

    takes_part = False

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output = super().forward(states)
        return output if self.communicator.rank == 0 else torch.zeros_like(output)


class ReducedInput(ParallelLayer):
    """A layer, such as a norm, that needs the whole product: it first sums the ranks' partial products."""

    gives_part = False

    def forward(self, partial_product: torch.Tensor) -> torch.Tensor:
        return super().forward(self.communicator.all_reduce(partial_product))


@dataclass(frozen=True)
class Experts(Rule):
    """Cut every expert by width: gate and up projection by columns, down projection by rows; the outputs are summed.

    For modules that stack experts as 3-D parameters `gate_up_proj` (or `up_proj`) and `down_proj`. Attributes of
    transformers' experts interface give the layout: transposed or not, gate and up side by side or interleaved, biases.
    If the module has a `post_expert_norm`, the ranks sum the output of each expert before that norm.

    Args:
        reduce: whether to sum the partial outputs in this module. False if a later `Reduce` rule sums several layers
            at once.
    """

    reduce: bool = True

    def apply(self, draft: Draft, path: str) -> None:
        module = draft.modules[path]
        names = dict(module.named_parameters(recurse=False))
        fused = "gate_up_proj" in names
        up_name = "gate_up_proj" if fused else "up_proj"
        if up_name not in names or "down_proj" not in names or names[up_name].ndim != 3:
            raise PolicyError(f"holds {sorted(names)}, not 3-D gate_up_proj (or up_proj) and down_proj")
        up, down = names[up_name], names["down_proj"]
        # A module without `is_transposed` has the layout that its shapes show: gate|up is twice as wide as down.
        looks_transposed = up.shape[1] == down.shape[2] and up.shape[2] == 2 * down.shape[1]
        transposed = getattr(module, "is_transposed", fused and looks_transposed)
        out_dim, in_dim = (2, 1) if transposed else (1, 2)
        width = down.shape[in_dim]
        if up.shape[out_dim] != width * (2 if fused else 1):
            raise PolicyError(f"{up_name} {list(up.shape)} does not fit down_proj {list(down.shape)}")
        granule = math.lcm(draft.group, 8) if has_groups(width, draft.world_size, draft.group) else 8
        bounds = spread_aligned(width, draft.world_size, granule, draft.shares)
        # Grouped matrix products refuse empty operands, so a rank without columns gets columns of zeros.
        idle = [start == stop for start, stop in bounds]
        bounds = [bounds[0] if off else own for own, off in zip(bounds, idle, strict=True)]
        down_ranges: list[tuple[Range, ...]] = [(own,) for own in bounds]
        if not fused:
            up_ranges = down_ranges
        elif getattr(module, "is_concatenated", True):
            up_ranges = [join([(start, stop), (width + start, width + stop)]) for start, stop in bounds]
        else:
            up_ranges = [((2 * start, 2 * stop),) for start, stop in bounds]
        draft.cut(f"{path}.{up_name}", out_dim, up_ranges, idle)
        draft.cut(f"{path}.down_proj", in_dim, down_ranges, idle)
        if f"{up_name}_bias" in names:
            draft.cut(f"{path}.{up_name}_bias", 1, up_ranges, idle)
        if "down_proj_bias" in names:
            draft.cut_on_first_rank(f"{path}.down_proj_bias")
        counts = ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size")
        scaled = [name for name in counts if getattr(module, name, None) == width]
        normed = isinstance(getattr(module, "post_expert_norm", None), nn.Module)
        widths = [dict.fromkeys(scaled, stop - start) for start, stop in bounds]
        draft.layer(path, Reduced if self.reduce and not normed else None, widths)
        if normed:  # the norm needs an expert's whole output, so the ranks sum that output before the norm
            draft.layer(f"{path}.post_expert_norm", ReducedInput)
        if isinstance(getattr(module, "identity_expert", None), nn.Identity):
            # Identity experts return their input, which the sum over the ranks must count only once.
            draft.layer(f"{path}.identity_expert", OnFirstRank)
