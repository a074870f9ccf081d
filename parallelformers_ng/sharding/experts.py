"""Experts stacked in 3-D parameters, each cut by width."""

from __future__ import annotations

import inspect

from torch import nn

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.partition import Range, join, spread_aligned
from parallelformers_ng.sharding.plan import LayerKind, Shard
from parallelformers_ng.sharding.policy import Experts


def stacked_experts(module: nn.Module) -> set[str]:
    """Names of the parameters of a module that stacks experts; empty for any other."""
    names = {name: p.ndim for name, p in module._parameters.items() if p is not None}
    stacked = names.get("down_proj") == 3 and 3 in (names.get("gate_up_proj"), names.get("up_proj"))
    return set(names) if stacked else set()


def has_experts_interface(module: nn.Module) -> bool:
    """Whether a module stacks experts and has the forward of transformers' experts interface."""
    if not stacked_experts(module):
        return False
    return {"hidden_states", "top_k_index", "top_k_weights"} <= set(inspect.signature(module.forward).parameters)


def cut_experts(draft: Draft, rule: Experts, path: str, module: nn.Module) -> None:
    """Geometry from the attributes that transformers' experts interface sets on the module."""
    names = dict(module.named_parameters(recurse=False))
    fused = "gate_up_proj" in names
    up_name = "gate_up_proj" if fused else "up_proj"
    if up_name not in names or "down_proj" not in names or names[up_name].ndim != 3:
        raise PolicyError(f"{draft.who}: holds {sorted(names)}, not 3-D gate_up_proj (or up_proj) and down_proj")
    up, down = names[up_name], names["down_proj"]
    # Modules without the interface's attribute: gate and up together are wider than down, whichever way they lie.
    lies = up.shape[1] == down.shape[2] and up.shape[2] == 2 * down.shape[1]
    transposed = getattr(module, "is_transposed", fused and lies)
    out_dim, in_dim = (2, 1) if transposed else (1, 2)
    width = down.shape[in_dim]
    if up.shape[out_dim] != width * (2 if fused else 1):
        raise PolicyError(f"{draft.who}: {up_name} {list(up.shape)} does not fit down_proj {list(down.shape)}")
    # A rank without columns holds a few of zeros, as the grouped matrix products take no empty operand.
    held = spread_aligned(width, draft.world_size)
    idle = [start == stop for start, stop in held]
    held = [held[0] if off else bounds for bounds, off in zip(held, idle, strict=True)]
    if not fused:
        up_held: list[tuple[Range, ...]] = [((start, stop),) for start, stop in held]
    elif getattr(module, "is_concatenated", True):
        up_held = [join([(start, stop), (width + start, width + stop)]) for start, stop in held]
    else:
        up_held = [((2 * start, 2 * stop),) for start, stop in held]
    for name, dim, ranges in (
        (up_name, out_dim, up_held),
        (f"{up_name}_bias", 1, up_held),
        ("down_proj", in_dim, [(bounds,) for bounds in held]),
    ):
        if name in names:
            draft.cut(f"{path}.{name}", [Shard(dim, mine, off) for mine, off in zip(ranges, idle, strict=True)])
    if "down_proj_bias" in names:
        draft.cut_on_first_rank(f"{path}.down_proj_bias")
    counts = ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size")
    scaled = [name for name in counts if getattr(module, name, None) == width]
    normed = isinstance(getattr(module, "post_expert_norm", None), nn.Module)
    kind: LayerKind = "reduced" if rule.reduce and not normed else "column"
    draft.layer(path, kind, [dict.fromkeys(scaled, stop - start) for start, stop in held])
    if normed:  # what an expert gives is summed before its norm, expert by expert, in the same order on all ranks
        draft.layer(f"{path}.post_expert_norm", "reduced_input", [{} for _ in held])
    if isinstance(getattr(module, "identity_expert", None), nn.Identity):
        # Experts that give back their input: the sum over the ranks counts them once.
        draft.layer(f"{path}.identity_expert", "on_first_rank", [{} for _ in held])
