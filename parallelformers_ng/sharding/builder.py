"""Policy × model skeleton × world size → ShardPlan. Pure: no weights, no processes, no GPU; `meta` models will do."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.partition import (
    HeadShare,
    Range,
    count_once,
    cut_interleaved,
    cut_width,
    join,
    share_heads,
    spread_aligned,
)
from parallelformers_ng.sharding.plan import WHOLE, ZERO, LayerKind, LayerPlan, Shard, ShardPlan, TensorPlan
from parallelformers_ng.sharding.policy import (
    Column,
    Experts,
    HeadNorms,
    Heads,
    Norm,
    Policy,
    Reduce,
    Row,
    Rule,
    Slice,
    Unit,
)
from parallelformers_ng.sharding.selection import Selection, is_block
from parallelformers_ng.sharding.vocabulary import find_vocabulary


def build_plan(model: nn.Module, world_size: int, selection: Selection, dtype: torch.dtype | None = None) -> ShardPlan:
    """Work out what each rank holds.

    Args:
        model: the model, on any device, also `meta`.
        world_size: number of ranks, at least 1.
        selection: the policies that apply, from `registry.select`.
        dtype: data type to cast floating-point parameters to; None leaves them.

    Raises:
        PolicyError: a rule matches no layer, or does not fit the layer it matches.
    """
    builder = _Builder(model, world_size)
    for policy in selection.policies:
        builder.apply(policy)
    if selection.vocabulary:
        builder.cut_vocabulary()
    return builder.finish(selection, dtype)


class _Builder:
    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.model = model
        self.world_size = world_size
        self.modules = dict(model.named_modules())
        self.cuts: dict[str, tuple[tuple[Shard, ...], str]] = {}
        self.layers: dict[str, LayerPlan] = {}
        self.experts: set[str] = set()
        self.blocks: list[str] = []
        self.who = ""

    # -- policies ------------------------------------------------------------------------------------------------

    def apply(self, policy: type[Policy]) -> None:
        blocks = [(path, module) for path, module in self.modules.items() if is_block(module, policy)]
        self.blocks += [path for path, _ in blocks]
        unmatched = set(policy.plan)
        for path, block in blocks:
            self._check_requirements(policy, path, block)
            heads = self._head_shares(policy, path, block)
            for rule_path, rule in policy.plan.items():
                target = _join(path, rule_path)
                self.who = f"{policy.__name__}: rule {rule_path!r} on {target}"
                above = getattr(rule, "heads", None)
                counted_by = heads.get(_nearest(rule_path, heads) if above is None else above, [])
                if self._apply_rule(rule, target, counted_by):
                    unmatched.discard(rule_path)
        for rule_path in sorted(unmatched):
            if not any(rule_path == path or rule_path.startswith(path + ".") for path in policy.optional):
                raise PolicyError(_no_match(policy, rule_path, blocks))

    def _check_requirements(self, policy: type[Policy], path: str, block: nn.Module) -> None:
        for name, wanted in policy.requires.items():
            value = attrgetter(name)(block)
            if value != wanted:
                raise PolicyError(
                    f"{policy.__name__}: {_join(path, name)} is {value!r}, and this policy holds for {wanted!r} alone"
                )

    def _head_shares(self, policy: type[Policy], path: str, block: nn.Module) -> dict[str, list[HeadShare]]:
        shares = {}
        for rule_path, rule in policy.plan.items():
            if not isinstance(rule, Heads) or (module := self.modules.get(_join(path, rule_path))) is None:
                continue
            self.who = f"{policy.__name__}: rule {rule_path!r} on {_join(path, rule_path)}"
            query = self._attribute(module, rule.query)
            key = self._attribute(module, rule.key) if rule.key else query
            shares[rule_path] = share_heads(query, key, self.world_size)
        return shares

    def _apply_rule(self, rule: Rule, target: str, heads: list[HeadShare]) -> bool:
        """Apply one rule to one place; False where the place does not exist in this block."""
        module = self.modules.get(target)
        if isinstance(rule, Slice):
            return self._slice(rule, target, heads)
        if module is None:
            return False
        if isinstance(rule, Heads):
            self._heads(rule, target, module, heads)
        elif isinstance(rule, Column):
            self._column(rule, target, module, heads)
        elif isinstance(rule, Row):
            self._row(rule, target, module, heads)
        elif isinstance(rule, Experts):
            self._experts(target, module)
        elif isinstance(rule, Norm):
            self._norm(rule, target, module, heads)
        elif isinstance(rule, HeadNorms):
            indices = [share.key if rule.unit == "key" else share.query for share in heads]
            self._layer(target, "head_norms", [{"head_indices": mine} for mine in indices])
        elif isinstance(rule, Reduce):
            self._layer(target, "reduced", [{} for _ in range(self.world_size)])
        else:
            raise PolicyError(f"{self.who}: {type(rule).__name__} is not a rule this version knows")
        return True

    # -- rules ---------------------------------------------------------------------------------------------------

    def _column(self, rule: Column, path: str, module: Any, heads: list[HeadShare]) -> None:
        dim, size_name = _output_geometry(self.who, module)
        size = module.weight.shape[dim]
        if rule.interleaved:
            ranges = self._interleaved(size, rule.interleaved, heads)
        else:
            ranges = self._ranges(size, rule.unit, rule.fused, heads)
        self._cut(f"{path}.weight", [Shard(dim, held) for held in ranges])
        if getattr(module, "bias", None) is not None:
            self._cut(f"{path}.bias", [Shard(0, held) for held in ranges])
        widths = [_width(held) for held in ranges]
        if rule.gather:
            if any(share.idle for share in heads) or sum(widths) != size:
                raise PolicyError(f"{self.who}: outputs that ranks hold twice cannot be gathered")
            attributes = [{size_name: width, "gathered_sizes": tuple(widths)} for width in widths]
            self._layer(path, "gathered_column", attributes)
        else:
            self._layer(path, "column", [{size_name: width} for width in widths])

    def _row(self, rule: Row, path: str, module: nn.Module, heads: list[HeadShare]) -> None:
        if not isinstance(module, (nn.Linear, Conv1D)):
            raise PolicyError(_cannot_cut(self.who, module, "rows (a Linear or Conv1D can)"))
        dim, size_name = (1, "in_features") if isinstance(module, nn.Linear) else (0, "nx")
        ranges = self._ranges(module.weight.shape[dim], rule.unit, rule.fused, heads)
        idle = [share.idle for share in heads] or [False] * self.world_size
        self._cut(f"{path}.weight", [Shard(dim, held, zero=off) for held, off in zip(ranges, idle, strict=True)])
        if module.bias is not None:
            self._cut_on_first_rank(f"{path}.bias")
        kind: LayerKind = "row" if rule.reduce else "column"
        self._layer(path, kind, [{size_name: _width(held)} for held in ranges])

    def _heads(self, rule: Heads, path: str, module: nn.Module, shares: list[HeadShare]) -> None:
        query, key = (self._attribute(module, rule.query), self._attribute(module, rule.key or rule.query))
        local: list[dict[str, Any]] = [{} for _ in range(self.world_size)]
        for attributes, share in zip(local, shares, strict=True):
            mine, mine_key = len(share.query), len(share.key)
            for name in _local_names(rule.query, rule.scaled):
                attributes[name] = self._scale(module, name, mine, query)
            for name in _local_names(rule.key, rule.scaled_key):
                if name not in attributes:
                    attributes[name] = self._scale(module, name, mine_key, key)
            if rule.groups:
                attributes[rule.groups] = share.groups
            attributes["head_sizes"] = tuple(0 if share.idle else len(share.query) for share in shares)
            attributes.update(weights_index=rule.weights, weights_dim=rule.weights_dim)
            if rule.biases:
                attributes.update(bias_names=rule.biases, head_count=query)
            if rule.biases or rule.layer:
                attributes["head_indices"] = share.query
        kind: LayerKind = rule.layer or ("biased_heads" if rule.biases else "heads")
        self._layer(path, kind, local)

    def _norm(self, rule: Norm, path: str, module: nn.Module, heads: list[HeadShare]) -> None:
        names = dict(module.named_parameters(recurse=False))
        if list(names) != ["weight"] or names["weight"].ndim != 1 or not hasattr(module, "variance_epsilon"):
            what = type(module).__name__
            raise PolicyError(f"{self.who}: a {what} is no norm with one `weight` and a `variance_epsilon`")
        width = names["weight"].shape[0]
        ranges = self._ranges(width, rule.unit, 1, heads)
        self._cut(f"{path}.weight", [Shard(0, held) for held in ranges])
        self._layer(path, "norm", [{"width": width, "counted": counted} for counted in count_once(ranges)])

    def _experts(self, path: str, module: nn.Module) -> None:
        """Geometry from the attributes that transformers' experts interface sets on the module."""
        names = dict(module.named_parameters(recurse=False))
        transposed = getattr(module, "is_transposed", False)
        fused = "gate_up_proj" in names
        up_name = "gate_up_proj" if fused else "up_proj"
        if up_name not in names or "down_proj" not in names or names[up_name].ndim != 3:
            raise PolicyError(f"{self.who}: holds {sorted(names)}, not 3-D gate_up_proj (or up_proj) and down_proj")
        up, down = names[up_name], names["down_proj"]
        out_dim, in_dim = (2, 1) if transposed else (1, 2)
        width = down.shape[in_dim]
        if up.shape[out_dim] != width * (2 if fused else 1):
            raise PolicyError(f"{self.who}: {up_name} {list(up.shape)} does not fit down_proj {list(down.shape)}")
        # A rank without columns holds a few of zeros, as the grouped matrix products take no empty operand.
        held = spread_aligned(width, self.world_size)
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
                self._cut(f"{path}.{name}", [Shard(dim, mine, off) for mine, off in zip(ranges, idle, strict=True)])
        if "down_proj_bias" in names:
            self._cut_on_first_rank(f"{path}.down_proj_bias")
        counts = ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size")
        scaled = [name for name in counts if getattr(module, name, None) == width]
        self._layer(path, "reduced", [dict.fromkeys(scaled, stop - start) for start, stop in held])
        self.experts.update(f"{path}.{name}" for name in names)

    def _slice(self, rule: Slice, target: str, heads: list[HeadShare]) -> bool:
        owner_path, _, name = target.rpartition(".")
        owner = self.modules.get(owner_path)
        tensor = None if owner is None else owner._parameters.get(name, owner._buffers.get(name))
        if tensor is None:
            return False
        if not -tensor.ndim <= rule.dim < tensor.ndim:
            raise PolicyError(f"{self.who}: has {tensor.ndim} dimensions, so there is no dimension {rule.dim}")
        dim = rule.dim % tensor.ndim
        ranges = self._ranges(tensor.shape[dim], rule.unit, rule.fused, heads)
        idle = [rule.partial and share.idle for share in heads] or [False] * self.world_size
        self._cut(target, [Shard(dim, held, zero=off) for held, off in zip(ranges, idle, strict=True)])
        return True

    def cut_vocabulary(self) -> None:
        """Cut input embeddings and output heads by rows of the vocabulary, tied or not."""
        for layer in find_vocabulary(self.model, taken=set(self.cuts)):
            self.who = f"vocabulary of {layer.path}"
            ranges = cut_width(layer.size, ["column"], [], self.world_size)
            for name in layer.tensors:
                self._cut(name, [Shard(0, held) for held in ranges], rule="vocabulary")
            bounds = [held[0] if held else (0, 0) for held in ranges]
            sizes = tuple(stop - start for start, stop in bounds)
            attributes = [
                {"first_row": start, "row_count": stop - start, "gathered_sizes": sizes} for start, stop in bounds
            ]
            self._layer(layer.path, layer.kind, attributes)

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _ranges(
        self, size: int, unit: Unit, fused: int | tuple[Unit, ...], heads: list[HeadShare]
    ) -> list[tuple[Range, ...]]:
        parts = fused if isinstance(fused, tuple) else (unit,) * fused
        default: Unit = "query" if heads else "column"
        resolved = [part or default for part in parts]
        if not heads and any(part in ("query", "key") for part in resolved):
            raise PolicyError(f"{self.who}: is counted in heads, but no rule above it says Heads(...)")
        try:
            return cut_width(size, resolved, heads, self.world_size)
        except PolicyError as error:
            raise PolicyError(f"{self.who}: {error}") from None

    def _interleaved(self, size: int, parts: tuple[Unit, ...], heads: list[HeadShare]) -> list[tuple[Range, ...]]:
        if not heads:
            raise PolicyError(f"{self.who}: is counted in heads, but no rule above it says Heads(...)")
        try:
            return cut_interleaved(size, parts, heads)
        except PolicyError as error:
            raise PolicyError(f"{self.who}: {error}") from None

    def _cut(self, name: str, shards: Sequence[Shard], rule: str = "") -> None:
        known = self.cuts.get(name)
        if known is not None and known[0] != tuple(shards):
            raise PolicyError(f"{self.who}: {name} is already cut otherwise, by {known[1]}")
        self.cuts[name] = (tuple(shards), rule or self.who.split(" on ")[0])

    def _cut_on_first_rank(self, name: str) -> None:
        self._cut(name, [WHOLE] + [ZERO] * (self.world_size - 1))

    def _layer(self, path: str, kind: LayerKind, attributes: Sequence[dict[str, Any]]) -> None:
        self.layers[f"{path}:{kind}"] = LayerPlan(path, kind, tuple(attributes))

    def _attribute(self, module: nn.Module, name: str) -> int:
        value: Any = module
        for part in name.split("."):
            if not hasattr(value, part):
                near = difflib.get_close_matches(part, [key for key in vars(value) if not key.startswith("_")], 1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise PolicyError(f"{self.who}: {type(module).__name__} has no attribute {name!r}{hint}")
            value = getattr(value, part)
        if not isinstance(value, int) or value < 1:
            raise PolicyError(f"{self.who}: {name} is {value!r}, a positive number is needed")
        return value

    def _scale(self, module: nn.Module, name: str, mine: int, total: int) -> int:
        value = self._attribute(module, name)
        if value * mine % total:
            raise PolicyError(f"{self.who}: {name} = {value} is not proportional to its {total} heads")
        return value * mine // total

    def finish(self, selection: Selection, dtype: torch.dtype | None) -> ShardPlan:
        keep_whole = (WHOLE,) * self.world_size
        casts = _CastRule(self.model, dtype)
        tensors: dict[str, TensorPlan] = {}
        holders: dict[tuple[int, tuple[Shard, ...]], str] = {}
        cuttable = set(self.experts)
        for path, module in self.modules.items():
            owned = [(name, p, False) for name, p in module._parameters.items() if p is not None]
            owned += [(name, b, True) for name, b in module._buffers.items() if b is not None]
            for short, tensor, is_buffer in owned:
                name = _join(path, short)
                shards, rule = self.cuts.get(name, (keep_whole, ""))
                storage = holders.setdefault((id(tensor), shards), name)
                persistent = short not in module._non_persistent_buffers_set
                target = casts.dtype_of(name, tensor) if persistent else tensor.dtype
                tensors[name] = TensorPlan(name, tuple(tensor.shape), target, shards, storage, is_buffer, rule)
                if short == "weight" and isinstance(module, (nn.Linear, Conv1D, nn.Embedding)):
                    cuttable.add(name)
        return ShardPlan(
            model_class=type(self.model).__name__,
            world_size=self.world_size,
            tensors=tensors,
            layers=list(self.layers.values()),
            blocks=self.blocks,
            policy=", ".join(policy.__name__ for policy in selection.policies),
            source=selection.source,
            cuttable=frozenset(cuttable),
        )


class _CastRule:
    """Which floating-point tensors a cast reaches: all but those that the model class keeps in fp32 (as
    `from_pretrained(dtype=…)` does; `PreTrainedModel._get_dtype_plan`)."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        in_fp32: set[str] = set()
        if dtype == torch.float16:
            in_fp32 |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
        if dtype in (torch.float16, torch.bfloat16):
            in_fp32 |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        self.in_fp32 = in_fp32

    def dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if self.dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        kept = any(f".{part}." in f".{name}." for part in self.in_fp32)
        return torch.float32 if kept else self.dtype


def _output_geometry(who: str, module: nn.Module) -> tuple[int, str]:
    """(dimension of `weight` that holds the outputs, attribute that counts them)."""
    if isinstance(module, nn.Linear):
        return 0, "out_features"
    if isinstance(module, Conv1D):
        return 1, "nf"
    if isinstance(module, nn.Embedding):
        return 1, "embedding_dim"
    raise PolicyError(_cannot_cut(who, module, "columns (a Linear, Conv1D or Embedding can)"))


def _cannot_cut(who: str, module: nn.Module, how: str) -> str:
    if hasattr(module, "base_layer"):
        return f"{who}: a {type(module).__name__} holds an adapter; merge it into the weights first (merge_and_unload)"
    return f"{who}: a {type(module).__name__} cannot be cut by {how}"


def _width(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _local_names(counted_by: str, scaled: tuple[str, ...]) -> tuple[str, ...]:
    """The attributes to set per rank. A count in the configuration is set only where the policy lists it as scaled."""
    return scaled if not counted_by or counted_by.startswith("config.") else (counted_by, *scaled)


def _nearest(path: str, heads: dict[str, list[HeadShare]]) -> str:
    """The closest module at or above `path` that has a `Heads` rule, or "?" where none has."""
    above = [prefix for prefix in heads if prefix == "" or path == prefix or path.startswith(prefix + ".")]
    return max(above, key=len, default="?")


def _no_match(policy: type[Policy], rule_path: str, blocks: Sequence[tuple[str, nn.Module]]) -> str:
    names = list(dict.fromkeys(name for _, block in blocks for name, _ in block.named_modules() if name))
    near = difflib.get_close_matches(rule_path, names, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else f" (its layers: {', '.join(names[:12])})"
    return f"{policy.__name__}: rule {rule_path!r} matches no layer of {'/'.join(policy.blocks())}{hint}"
