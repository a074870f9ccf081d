"""Defines the draft of a plan: rules record in it how each tensor is cut and which parallel layer a module becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelformers_ng.errors import PolicyError, did_you_mean
from parallelformers_ng.sharding.layers import LayerPlan, ParallelLayer
from parallelformers_ng.sharding.partition import HeadShare, Part, Range, Unit, cut_interleaved, cut_width
from parallelformers_ng.sharding.tensor_plan import WHOLE, ZERO, Cut, Shard


@dataclass
class Draft:
    """An unfinished plan of one model, to which each rule adds its cuts and parallel layers."""

    model: nn.Module  # the model, on any device
    world_size: int  # number of ranks
    parts: Sequence[float] = ()  # each rank's fraction of the model, sum 1; empty for equal fractions
    shares: Sequence[float] = ()  # each rank's fraction of columns that are not heads; empty for equal fractions
    row_shares: Sequence[float] = ()  # each rank's fraction of a vocabulary's rows; empty for equal fractions
    group: int = 1  # number of adjacent columns that must stay on one rank, because they share a quantization scale
    # dotted path of a module that runs foreign code → description of the code; empty if foreign code may be cut
    foreign: Mapping[str, str] = field(default_factory=dict)
    # tensor name → a shard for each rank, and the rule that cut the tensor
    cuts: dict[str, Cut] = field(default_factory=dict)
    # (module path, class of the parallel layer, names of attributes) → change that `inject` makes to the module
    layers: dict[tuple[Any, ...], LayerPlan] = field(default_factory=dict)

    rule: str = ""  # name of the policy and the rule that are being applied, for error messages
    # module whose attributes count the heads for the current rule; None if the rule's layer is not counted in heads
    counter: nn.Module | None = None
    heads: Sequence[HeadShare] = ()  # each rank's heads for the current rule; empty if `counter` is None

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())  # dotted path → module

    def cut(self, name: str, dim: int, ranges: Sequence[tuple[Range, ...]], zero: Sequence[bool] = ()) -> None:
        """Record each rank's ranges of a tensor along `dim`; a rank with `zero` holds zeros instead of the values."""
        zeros = zero or [False] * self.world_size
        self._note(name, tuple(Shard(dim, own, off) for own, off in zip(ranges, zeros, strict=True)))

    def cut_on_first_rank(self, name: str) -> None:
        """Give the whole tensor to rank 0 and zeros to all other ranks, so that a sum over the ranks adds it once."""
        self._note(name, (WHOLE, *[ZERO] * (self.world_size - 1)))

    def _note(self, name: str, shards: tuple[Shard, ...]) -> None:
        known = self.cuts.get(name)
        if known is not None and known[0] != shards:
            raise PolicyError(f"{name} is already cut in another way, by {known[1]}")
        self.cuts[name] = shards, self.rule

    def layer(
        self, path: str, cls: type[ParallelLayer] | None, attributes: Sequence[Mapping[str, Any]] = (), **shared: Any
    ) -> None:
        """Record the parallel layer that a module becomes, and the module's attributes to set on the ranks.

        `attributes` has a dictionary for each rank; `shared` is equal on all ranks. An earlier record with the same
        path, class and names of attributes is replaced.
        """
        local = tuple({**mine, **shared} for mine in attributes or [{}] * self.world_size)
        self.layers[path, cls, *local[0]] = LayerPlan(path, cls, local)

    def ranges(
        self,
        size: int,
        unit: Unit = "column",
        fused: int | tuple[Unit | Part, ...] = 1,
        interleaved: tuple[Unit | Part, ...] = (),
    ) -> list[tuple[Range, ...]]:
        """Divide a dimension of `size` among the ranks; return the ranges of each rank.

        `fused` and `interleaved` say how the dimension is packed, as in `Column`.
        """
        parts = interleaved or (fused if isinstance(fused, tuple) else (unit,) * fused)
        default: Unit = "query" if self.heads or interleaved else "column"
        units = [(part.unit if isinstance(part, Part) else part) or default for part in parts]
        named = [part.width for part in parts if isinstance(part, Part)]
        if named and len(named) < len(parts):
            raise PolicyError("either all or none of its parts must be a Part")
        if not self.heads and not {"query", "key"}.isdisjoint(units):
            raise PolicyError("is counted in heads, but no rule above it is Heads(...)")
        widths = [self.counted(width) if isinstance(width, str) else width for width in named]
        if interleaved:
            return cut_interleaved(size, units, self.heads, widths)
        return cut_width(size, units, self.heads, self.world_size, widths, self.shares, self.group)

    def tensor(self, name: str) -> torch.Tensor | None:
        path, _, short = name.rpartition(".")
        owner = self.modules.get(path)
        return None if owner is None else owner._parameters.get(short, owner._buffers.get(short))

    def counted(self, name: str) -> int:
        """Return a positive integer attribute of the module that counts the heads, or of the model if there is none."""
        return self.attribute(self.counter or self.model, name)

    def attribute(self, module: nn.Module, name: str) -> int:
        """Return a positive integer attribute by its dotted name from a module: "config.num_attention_heads"."""
        value: Any = module
        for part in name.split("."):
            if not hasattr(value, part):
                hint = did_you_mean(part, (key for key in vars(value) if not key.startswith("_")))
                raise PolicyError(f"{type(module).__name__} has no attribute {name!r}{hint}")
            value = getattr(value, part)
        if not isinstance(value, int) or value < 1:
            raise PolicyError(f"{name} is {value!r}; it must be a positive integer")
        return value

    def scale(self, module: nn.Module, name: str, mine: int, total: int) -> int:
        value = self.attribute(module, name)
        if value * mine % total:
            raise PolicyError(f"{name} = {value} is not proportional to its {total} heads")
        return value * mine // total
