"""What each rule of a policy means for the layer it names: which slices of its tensors a rank holds, and which
attributes the rank's copy of the layer gets."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.calls import CONVOLUTIONS
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.experts import cut_experts
from parallelformers_ng.sharding.partition import HeadShare, Range, count_once, group_runs
from parallelformers_ng.sharding.plan import LayerKind, Shard
from parallelformers_ng.sharding.policy import (
    Column,
    Experts,
    Gather,
    GaussianTopK,
    HeadNorms,
    Heads,
    Norm,
    Reduce,
    Renewed,
    Row,
    Rule,
    Slice,
    Stored,
    Vocabulary,
)
from parallelformers_ng.sharding.structure import dotted


def apply_rule(draft: Draft, rule: Rule, target: str, heads: list[HeadShare]) -> bool:
    """Apply one rule to one place; False where the place does not exist in this block."""
    module = draft.modules.get(target)
    if isinstance(rule, Slice):
        return _slice(draft, rule, target, heads)
    if module is None or isinstance(module, nn.Identity):
        return False
    if isinstance(rule, Heads):
        _heads(draft, rule, target, module, heads)
    elif isinstance(rule, Column):
        _column(draft, rule, target, module, heads)
    elif isinstance(rule, Row):
        _row(draft, rule, target, module, heads)
    elif isinstance(rule, Experts):
        cut_experts(draft, rule, target, module)
    elif isinstance(rule, Norm):
        _norm(draft, rule, target, module, heads)
    elif isinstance(rule, HeadNorms):
        indices = [share.key if rule.unit == "key" else share.query for share in heads]
        draft.layer(target, "head_norms", [{"head_indices": mine} for mine in indices])
    elif isinstance(rule, GaussianTopK):
        width = draft.attribute(module, "intermediate_size")
        draft.layer(target, "gaussian_topk", [{"width": width} for _ in range(draft.world_size)])
    elif isinstance(rule, Vocabulary):
        _vocabulary(draft, target, module)
    elif isinstance(rule, Stored):
        for name in rule.names:
            store(draft, target, name, 0)
    elif isinstance(rule, Gather):
        layer = draft.modules.get(f"{target}.{rule.layer}")
        if layer is None or not hasattr(layer, "weight"):
            raise PolicyError(f"{draft.who}: there is no layer {rule.layer!r} with a weight beneath it")
        size = layer.weight.shape[0]
        widths = tuple(_width(held) for held in draft.ranges(size, "column", 1, []))
        draft.layer(target, "gathered_column", [{"gathered_sizes": widths}] * draft.world_size)
    elif isinstance(rule, Renewed):
        (carried,) = (layer for layer in draft.layers.values() if layer.path == f"{target}.{rule.attention}")
        names = (*carried.attributes[0], "communicator")
        draft.layer(target, "renewed", [{"carried": names}] * draft.world_size)
    elif isinstance(rule, Reduce):
        draft.layer(target, "reduced", [{} for _ in range(draft.world_size)])
    else:
        raise PolicyError(f"{draft.who}: {type(rule).__name__} is not a rule this version knows")
    return True


def _column(draft: Draft, rule: Column, path: str, module: Any, heads: list[HeadShare]) -> None:
    if hasattr(module, "group_out_dim"):
        return _grouped(draft, path, module, 2, "output_size", "group_out_dim")
    dim, size_names = _output_geometry(draft.who, module)
    size = module.weight.shape[dim]
    if rule.interleaved:
        ranges = draft.interleaved(size, rule.interleaved, heads)
    else:
        ranges = draft.ranges(size, rule.unit, rule.fused, heads)
    draft.cut(f"{path}.weight", [Shard(dim, held) for held in ranges])
    if getattr(module, "bias", None) is not None:
        draft.cut(f"{path}.bias", [Shard(0, held) for held in ranges])
    widths = [_width(held) for held in ranges]
    if getattr(module, "groups", 1) > 1 and not _is_depthwise(module):
        draft.layer(path, "grouped_column", [{"pieces": _pieces(module, held)} for held in ranges])
    if rule.gather_inputs and not heads:
        raise PolicyError(
            f"{draft.who}: gathers inputs that are counted in heads, but no rule above it says Heads(...)"
        )
    if rule.gather_inputs:
        own = draft.ranges(module.weight.shape[1 - dim], rule.unit, 1, heads)
        sizes = tuple(0 if share.idle else _width(held) for share, held in zip(heads, own, strict=True))
        draft.layer(path, "gathered_input", [{"input_sizes": sizes}] * draft.world_size)
    if rule.gather:
        if sum(widths) != size:
            raise PolicyError(f"{draft.who}: outputs that ranks hold twice cannot be gathered")
        gathered = {"gathered_sizes": tuple(widths), "gathered_dim": _output_dim(module)}
        attributes = [{**dict.fromkeys(size_names, width), **gathered} for width in widths]
        draft.layer(path, "gathered_column", attributes)
    else:
        draft.layer(path, "column", [dict.fromkeys(size_names, width) for width in widths])
    if rule.widths:
        owner, _, name = path.rpartition(".")
        draft.widths(owner, name, rule.widths, widths)


def _row(draft: Draft, rule: Row, path: str, module: Any, heads: list[HeadShare]) -> None:
    if hasattr(module, "group_in_dim"):
        return _grouped(draft, path, module, 1, "input_size", "group_in_dim")
    dim, size_name = _input_geometry(draft.who, module)
    ranges = draft.ranges(module.weight.shape[dim], rule.unit, rule.fused, heads)
    idle = [share.idle for share in heads] or [False] * draft.world_size
    draft.cut(f"{path}.weight", [Shard(dim, held, zero=off) for held, off in zip(ranges, idle, strict=True)])
    if getattr(module, "bias", None) is not None:
        draft.cut_on_first_rank(f"{path}.bias")
    kind: LayerKind = "row" if rule.reduce else "column"
    draft.layer(path, kind, [{size_name: _width(held)} for held in ranges])


def _grouped(draft: Draft, path: str, module: Any, dim: int, size_name: str, group_name: str) -> None:
    """A linear layer in groups, its weight `[groups, in, out]`: each group is cut alike."""
    ranges = draft.ranges(module.weight.shape[dim], "column", 1, [])
    draft.cut(f"{path}.weight", [Shard(dim, held) for held in ranges])
    if dim == 2:
        held_biases = draft.ranges(module.bias.shape[0], "column", module.num_groups, [])
        draft.cut(f"{path}.bias", [Shard(0, held) for held in held_biases])
    else:
        draft.cut_on_first_rank(f"{path}.bias")
    widths = [_width(held) for held in ranges]
    sizes = [{size_name: width * module.num_groups, group_name: width} for width in widths]
    draft.layer(path, "column" if dim == 2 else "row", sizes)


def _heads(draft: Draft, rule: Heads, path: str, module: nn.Module, shares: list[HeadShare]) -> None:
    query, key = count_heads(draft, rule, module)
    kind: LayerKind = "narrowed_heads" if rule.input_width else "biased_heads" if rule.biases else "heads"
    kind = rule.layer or kind
    local: list[dict[str, Any]] = [{} for _ in range(draft.world_size)]
    for attributes, share in zip(local, shares, strict=True):
        mine, mine_key = len(share.query), len(share.key)
        for name in _local_names(rule.query, rule.scaled):
            attributes[name] = draft.scale(module, name, mine, query)
        for name in _local_names(rule.key, rule.scaled_key):
            if name not in attributes:
                attributes[name] = draft.scale(module, name, mine_key, key)
        if rule.groups:
            attributes[rule.groups] = share.groups
        attributes["head_sizes"] = tuple(0 if share.idle else len(share.query) for share in shares)
        attributes["weights_at"] = tuple(
            (place if isinstance(place, tuple) else (place,), dim)
            for place, dim in ((rule.weights, rule.weights_dim), *rule.more_weights)
            if place is not None
        )
        attributes.update(dict.fromkeys(rule.fresh))
        if kind != "heads":
            attributes.update(bias_names=rule.biases, head_count=query, head_indices=share.query)
    draft.layer(path, kind, local)


def count_heads(draft: Draft, rule: Heads, module: nn.Module) -> tuple[int, int]:
    """(query heads, key/value heads) of an attention."""
    query = draft.attribute(module, rule.query)
    if rule.key:
        return query, draft.attribute(module, rule.key)
    return query, query // draft.attribute(module, rule.groups) if rule.groups else query


def _norm(draft: Draft, rule: Norm, path: str, module: Any, heads: list[HeadShare]) -> None:
    names = dict(module.named_parameters(recurse=False))
    if list(names) != ["weight"] or names["weight"].ndim != 1 or not hasattr(module, "variance_epsilon"):
        what = type(module).__name__
        raise PolicyError(f"{draft.who}: a {what} is no norm with one `weight` and a `variance_epsilon`")
    width = names["weight"].shape[0]
    ranges = draft.ranges(width, rule.unit, 1, heads)
    draft.cut(f"{path}.weight", [Shard(0, held) for held in ranges])
    count = width // module.group_size if hasattr(module, "group_size") else getattr(module, "n_groups", 1)
    attributes = [
        {"runs": group_runs(held, counted, width // count), "group_count": count, "group_width": width // count}
        for held, counted in zip(ranges, count_once(ranges), strict=True)
    ]
    gated = "gate" in inspect.signature(module.forward).parameters
    draft.layer(path, "gated_norm" if gated else "norm", attributes)


def _slice(draft: Draft, rule: Slice, target: str, heads: list[HeadShare]) -> bool:
    owner_path, _, name = target.rpartition(".")
    owner = draft.modules.get(owner_path)
    tensor = None if owner is None else owner._parameters.get(name, owner._buffers.get(name))
    if tensor is None:
        return False
    if not -tensor.ndim <= rule.dim < tensor.ndim:
        raise PolicyError(f"{draft.who}: has {tensor.ndim} dimensions, so there is no dimension {rule.dim}")
    dim = rule.dim % tensor.ndim
    fused = draft.counted(rule.fused) if isinstance(rule.fused, str) else rule.fused
    ranges = draft.ranges(tensor.shape[dim], rule.unit, fused, heads)
    idle = [rule.partial and share.idle for share in heads] or [False] * draft.world_size
    draft.cut(target, [Shard(dim, held, zero=off) for held, off in zip(ranges, idle, strict=True)])
    return True


def _vocabulary(draft: Draft, path: str, module: Any) -> None:
    if not isinstance(module, nn.Embedding) and not hasattr(module, "weight_integer"):
        raise PolicyError(_cannot_cut(draft.who, module, "rows of its vocabulary (an Embedding can)"))
    kind: LayerKind = "vocabulary_embedding" if isinstance(module, nn.Embedding) else "quantized_embedding"
    draft.vocabulary(path, kind, module.weight.shape[0], [f"{path}.weight"])


def store(draft: Draft, path: str, name: str, dim: int) -> None:
    """Spread a module's parameter or buffer over the ranks along `dim`, to be put together when it is read."""
    module = draft.modules[path]
    tensor = {**module._parameters, **module._buffers}.get(name)
    if tensor is None:
        raise PolicyError(f"{draft.who}: {type(module).__name__} has no parameter or buffer {name!r}")
    ranges = draft.ranges(tensor.shape[dim], "column", 1, [])
    draft.cut(dotted(path, name), [Shard(dim, held) for held in ranges])
    known = draft.layers.get(f"{path}:stored")
    sizes = tuple(_width(held) for held in ranges)
    stored = {**(known.attributes[0]["stored"] if known else {}), name: (dim, sizes)}
    draft.layer(path, "stored", [{"stored": stored}] * draft.world_size)


def _pieces(module: nn.Conv1d, held: Sequence[Range]) -> tuple[tuple[int, int, int], ...]:
    """What of each group's outputs lies in the ranges held, with the group's input channels."""
    inputs, outputs = module.in_channels // module.groups, module.out_channels // module.groups
    found = []
    for start, stop in held:
        for group in range(start // outputs, (stop - 1) // outputs + 1):
            count = min(stop, (group + 1) * outputs) - max(start, group * outputs)
            found.append((group * inputs, (group + 1) * inputs, count))
    return tuple(found)


def _output_geometry(who: str, module: nn.Module) -> tuple[int, tuple[str, ...]]:
    """(dimension of `weight` that holds the outputs, attributes that count them)."""
    if _is_linear(module):
        return 0, ("out_features",)
    if isinstance(module, CONVOLUTIONS):
        # A depthwise one has as many channels coming in as going out, each a group of its own.
        return 0, ("in_channels", "out_channels", "groups") if _is_depthwise(module) else ("out_channels",)
    if isinstance(module, Conv1D):
        return 1, ("nf",)
    if isinstance(module, nn.Embedding):
        return 1, ("embedding_dim",)
    if _stacks_linears(module):
        return 1, ("output_size",)
    raise PolicyError(_cannot_cut(who, module, "columns (a Linear, Conv1D, Embedding or convolution can)"))


def _output_dim(module: nn.Module) -> int:
    """Where a layer's outputs have their columns, or channels."""
    return -module.weight.ndim + 1 if isinstance(module, CONVOLUTIONS) else -1


def _is_depthwise(module: Any) -> bool:
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels


def _input_geometry(who: str, module: nn.Module) -> tuple[int, str]:
    """(dimension of `weight` that holds the inputs, attribute that counts them)."""
    if _is_linear(module):
        return 1, "in_features"
    if isinstance(module, Conv1D):
        return 0, "nx"
    if isinstance(module, nn.Conv1d) and module.groups == 1:
        return 1, "in_channels"
    if _stacks_linears(module):
        return 2, "input_size"
    raise PolicyError(_cannot_cut(who, module, "rows (a Linear, Conv1D or ungrouped Conv1d can)"))


def _is_linear(module: nn.Module) -> bool:
    """Whether it is a Linear, or a layer like it with a weight of its own (I-BERT's `QuantLinear`)."""
    weight = module._parameters.get("weight")
    return isinstance(module, nn.Linear) or (weight is not None and weight.ndim == 2 and hasattr(module, "in_features"))


def _stacks_linears(module: nn.Module) -> bool:
    """Whether it is a linear layer for each of several experts, its weight `[experts, out, in]`."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 3 and hasattr(module, "input_size") and hasattr(module, "output_size")


def _cannot_cut(who: str, module: nn.Module, how: str) -> str:
    if hasattr(module, "base_layer"):
        return f"{who}: a {type(module).__name__} holds an adapter; merge it into the weights first (merge_and_unload)"
    return f"{who}: a {type(module).__name__} cannot be cut by {how}"


def _width(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _local_names(counted_by: str, scaled: tuple[str, ...]) -> tuple[str, ...]:
    """The attributes to set per rank. A count in the configuration is set only where the policy lists it as scaled."""
    return scaled if not counted_by or counted_by.startswith("config.") else (counted_by, *scaled)
