"""Drafts a plan: records cuts and parallel layers, and divides widths and attributes among the ranks."""

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
    """Cuts and parallel layers of one model, recorded rule by rule."""

    model: nn.Module  # the model, on any device
    world_size: int  # number of ranks
    parts: Sequence[float] = ()  # fraction of the model for each rank, sum 1; empty for equal fractions
    shares: Sequence[float] = ()  # fraction for each rank of widths that are not counted in heads, as in `spread`
    row_shares: Sequence[float] = ()  # fraction for each rank of the rows of a vocabulary, as in `spread`
    group: int = 1  # width of the column groups that are not cut, as in `spread_columns`
    # dotted path of a module that runs foreign code → description of the code; empty if foreign code does not matter
    foreign: Mapping[str, str] = field(default_factory=dict)
    # tensor name → one shard per rank, and the rule that made the shards
    cuts: dict[str, Cut] = field(default_factory=dict)
    # module path, parallel layer and names of attributes → job of the injector
    layers: dict[tuple[Any, ...], LayerPlan] = field(default_factory=dict)

    rule: str = ""  # policy and rule being applied
    # module that counts the heads for the current rule; None if no module does
    counter: nn.Module | None = None
    heads: Sequence[HeadShare] = ()  # heads of each rank for the current rule; empty outside attention

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())  # dotted path → module

    # -- notes ---------------------------------------------------------------------------------------------------

    def cut(self, name: str, dim: int, ranges: Sequence[tuple[Range, ...]], zero: Sequence[bool] = ()) -> None:
        """Cut a tensor along `dim`."""
        zeros = zero or [False] * self.world_size
        self._note(name, tuple(Shard(dim, own, off) for own, off in zip(ranges, zeros, strict=True)))

    def cut_on_first_rank(self, name: str) -> None:
        """Give the whole tensor to rank 0, and zeros to all other ranks, for a tensor that a sum over ranks adds."""
        self._note(name, (WHOLE, *[ZERO] * (self.world_size - 1)))

    def _note(self, name: str, shards: tuple[Shard, ...]) -> None:
        known = self.cuts.get(name)
        if known is not None and known[0] != shards:
            raise PolicyError(f"{name} is already cut in another way, by {known[1]}")
        self.cuts[name] = shards, self.rule

    def layer(
        self, path: str, cls: type[ParallelLayer] | None, attributes: Sequence[Mapping[str, Any]] = (), **shared: Any
    ) -> None:
        """Record the parallel layer that a module becomes, and the attributes to set.

        `attributes` differ between ranks; `shared` are equal on all ranks. A record with the same path, class and names
        of attributes is replaced.
        """
        local = tuple({**mine, **shared} for mine in attributes or [{}] * self.world_size)
        self.layers[path, cls, *local[0]] = LayerPlan(path, cls, local)

    # -- shares --------------------------------------------------------------------------------------------------

    def ranges(
        self,
        size: int,
        unit: Unit = "column",
        fused: int | tuple[Unit | Part, ...] = 1,
        interleaved: tuple[Unit | Part, ...] = (),
    ) -> list[tuple[Range, ...]]:
        """Return the ranges of each rank in a dimension of `size`.

        The dimension is packed from adjacent parts, or from parts `interleaved` within each key/value head's group.
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
        """Return the attribute `name` of the module that counts the heads; of the model if no module does."""
        return self.attribute(self.counter or self.model, name)

    def attribute(self, module: nn.Module, name: str) -> int:
        """Return a count of a module by its dotted name, such as "config.num_attention_heads"."""
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
