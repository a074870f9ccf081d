"""Drafts a plan: records cuts and parallel layers, and divides widths and attributes among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parallelformers_ng.errors import PolicyError, did_you_mean
from parallelformers_ng.live_code.stock import foreign_modules
from parallelformers_ng.sharding.layers import LayerPlan, ParallelLayer
from parallelformers_ng.sharding.partition import HeadShare, Range, cut_interleaved, cut_width
from parallelformers_ng.sharding.policy_words import Part, Unit
from parallelformers_ng.sharding.tensor_plan import WHOLE, ZERO, Cut, Shard


class Draft:
    """Cuts and parallel layers of one model, recorded rule by rule."""

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        parts: Sequence[float] = (),
        shares: Sequence[float] = (),
        group: int = 1,
        proven: bool = False,
        row_shares: Sequence[float] | None = None,
    ) -> None:
        self.world_size = world_size  # number of ranks
        self.parts = parts  # fraction of the model for each rank, sum 1; empty for equal fractions
        self.shares = shares  # fraction for each rank of widths that are not counted in heads, as in `spread`
        # fraction for each rank of the rows of a vocabulary, as in `spread`
        self.row_shares = shares if row_shares is None else row_shares
        self.group = group  # width of the column groups that are not cut, as in `spread_columns`
        self.model = model  # the model, on any device
        self.modules = dict(model.named_modules())  # dotted path → module
        # dotted path of a module that runs foreign code → description of the code; empty if a proof has run it
        self.foreign = {} if proven else foreign_modules(model)
        # tensor name → one shard per rank, and the rule that made the shards
        self.cuts: dict[str, Cut] = {}
        # module path, and parallel layer or name of a child layer → job of the injector
        self.layers: dict[tuple[str, Any], LayerPlan] = {}
        self.who = ""  # policy, rule and path being applied, for error messages
        # module that counts the heads for the current rule; None if no module does
        self.counter: nn.Module | None = None

    # -- notes ---------------------------------------------------------------------------------------------------

    def cut(
        self, name: str, dim: int, ranges: Sequence[tuple[Range, ...]], zero: Sequence[bool] = (), rule: str = ""
    ) -> None:
        """Cut a tensor along `dim`."""
        zeros = zero or [False] * self.world_size
        self._note(name, [Shard(dim, rank_ranges, off) for rank_ranges, off in zip(ranges, zeros, strict=True)], rule)

    def cut_on_first_rank(self, name: str) -> None:
        """Give the whole tensor to rank 0, and zeros to all other ranks, for a tensor that a sum over ranks adds."""
        self._note(name, [WHOLE] + [ZERO] * (self.world_size - 1))

    def _note(self, name: str, shards: Sequence[Shard], rule: str = "") -> None:
        known = self.cuts.get(name)
        if known is not None and known[0] != tuple(shards):
            raise PolicyError(f"{self.who}: {name} is already cut in another way, by {known[1]}")
        self.cuts[name] = (tuple(shards), rule or self.who.split(" on ")[0])

    def layer(
        self, path: str, cls: type[ParallelLayer] | None, attributes: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Record the parallel layer that a module becomes, and the attributes to set on each rank.

        A record with the same path and class is replaced.
        """
        local = [{} for _ in range(self.world_size)] if attributes is None else attributes
        self.layers[path, cls] = LayerPlan(path, cls, tuple(local))

    def widths(self, owner: str, layer: str, names: Sequence[str], widths: Sequence[int]) -> None:
        """Record attributes of the module `owner` that count the outputs of its child `layer` on each rank."""
        for name in names:
            self.attribute(self.modules[owner], name)
        attributes = tuple(dict.fromkeys(names, width) for width in widths)
        self.layers[owner, layer] = LayerPlan(owner, None, attributes)

    # -- shares --------------------------------------------------------------------------------------------------

    def ranges(
        self,
        size: int,
        unit: Unit,
        fused: int | tuple[Unit | Part, ...],
        heads: list[HeadShare],
        interleaved: bool = False,
    ) -> list[tuple[Range, ...]]:
        """Return the ranges of each rank in a dimension of `size`.

        The dimension is packed from adjacent parts, or from parts `interleaved` within each key/value head's group.
        """
        default: Unit = "query" if heads or interleaved else "column"
        units, widths = self._parts(fused if isinstance(fused, tuple) else (unit,) * fused, default)
        if not heads and any(part in ("query", "key") for part in units):
            raise PolicyError(f"{self.who}: is counted in heads, but no rule above it is Heads(...)")
        try:
            if interleaved:
                return cut_interleaved(size, units, heads, widths)
            return cut_width(size, units, heads, self.world_size, widths, self.shares, self.group)
        except PolicyError as error:
            raise PolicyError(f"{self.who}: {error}") from None

    def _parts(self, parts: Sequence[Unit | Part], default: Unit) -> tuple[list[Unit], list[int]]:
        """Return the unit of each part, and the head width of each part; no widths if no part is a `Part`."""
        units = [(part.unit if isinstance(part, Part) else part) or default for part in parts]
        named = [part.width for part in parts if isinstance(part, Part)]
        if named and len(named) < len(parts):
            raise PolicyError(f"{self.who}: either all or none of its parts must be a Part")
        widths = [self.counted(width) if isinstance(width, str) else width for width in named]
        return units, widths

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
                raise PolicyError(f"{self.who}: {type(module).__name__} has no attribute {name!r}{hint}")
            value = getattr(value, part)
        if not isinstance(value, int) or value < 1:
            raise PolicyError(f"{self.who}: {name} is {value!r}; it must be a positive integer")
        return value

    def scale(self, module: nn.Module, name: str, mine: int, total: int) -> int:
        value = self.attribute(module, name)
        if value * mine % total:
            raise PolicyError(f"{self.who}: {name} = {value} is not proportional to its {total} heads")
        return value * mine // total
