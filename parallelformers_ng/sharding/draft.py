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
from parallelformers_ng.sharding.tensor_plan import WHOLE, ZERO, Shard


class Draft:
    """Cuts and parallel layers of one model, recorded rule by rule.

    Args:
        proven: whether a proof has run the foreign code of the model.

    Attributes:
        model: the model, on any device.
        world_size: number of ranks.
        parts: fraction of the model for each rank, sum 1; empty for equal fractions.
        shares: fraction for each rank of widths that are not counted in heads, as in `spread`.
        row_shares: fraction for each rank of the rows of a vocabulary, as in `spread`.
        group: width of the column groups that are not cut, as in `spread_columns`.
        modules: dotted path → module.
        foreign: dotted path of a module that runs foreign code → description of the code; empty if a proof has run it.
        cuts: tensor name → one shard per rank, and the rule that made the shards.
        layers: module path, and parallel layer or name of a child layer → job of the injector.
        who: policy, rule and path being applied, for error messages.
        counter: module that counts the heads for the current rule; None if no module does.
    """

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
        self.world_size = world_size
        self.parts = parts
        self.shares = shares
        self.row_shares = shares if row_shares is None else row_shares
        self.group = group
        self.model = model
        self.modules = dict(model.named_modules())
        self.foreign = {} if proven else foreign_modules(model)
        self.cuts: dict[str, tuple[tuple[Shard, ...], str]] = {}
        self.layers: dict[tuple[str, Any], LayerPlan] = {}
        self.who = ""
        self.counter: nn.Module | None = None

    # -- notes ---------------------------------------------------------------------------------------------------

    def cut(
        self, name: str, dim: int, ranges: Sequence[tuple[Range, ...]], zero: Sequence[bool] = (), rule: str = ""
    ) -> None:
        """Cut a tensor along `dim`.

        Args:
            name: dotted name of the tensor in the model.
            dim: dimension to cut, from 0.
            ranges: ranges held by each rank.
            zero: whether each rank holds zeros instead of values; by default no rank does.
            rule: name of the rule in the plan; by default, policy and rule in `who`.

        Raises:
            PolicyError: the tensor is already cut in another way.
        """
        zeros = zero or [False] * self.world_size
        self._note(name, [Shard(dim, rank_ranges, off) for rank_ranges, off in zip(ranges, zeros, strict=True)], rule)

    def cut_on_first_rank(self, name: str) -> None:
        """Give the whole tensor to rank 0, and zeros to all other ranks, for a tensor that a sum over ranks adds.

        Raises:
            PolicyError: the tensor is already cut in another way.
        """
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

        Args:
            path: dotted path of the module.
            cls: parallel layer; None if only attributes change.
            attributes: dotted name → value, for each rank; None for no attributes.
        """
        local = [{} for _ in range(self.world_size)] if attributes is None else attributes
        self.layers[path, cls] = LayerPlan(path, cls, tuple(local))

    def widths(self, owner: str, layer: str, names: Sequence[str], widths: Sequence[int]) -> None:
        """Record attributes of the module `owner` that count the outputs of its child `layer` on each rank.

        Args:
            owner: dotted path of the module.
            layer: name of the child.
            names: names of the attributes.
            widths: number of the child's outputs on each rank.

        Raises:
            PolicyError: an attribute is missing, or is no positive integer.
        """
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

        Args:
            size: length of the dimension.
            unit: unit of all parts, if `fused` is a number.
            fused: number of equal parts, or the unit of each part.
            heads: heads of each rank in the surrounding attention; empty outside attention.
            interleaved: whether the parts are packed within each group.

        Raises:
            PolicyError: the parts do not fit the size, count heads outside attention, or have a `Part.width` that the
                attention does not have. Another cause: only some of the parts are a `Part`.
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
        """Return the parameter or buffer of that name; None if the model has none."""
        path, _, short = name.rpartition(".")
        owner = self.modules.get(path)
        return None if owner is None else owner._parameters.get(short, owner._buffers.get(short))

    def counted(self, name: str) -> int:
        """Return the attribute `name` of the module that counts the heads; of the model if no module does.

        Raises:
            PolicyError: the attribute is missing, or is no positive integer.
        """
        return self.attribute(self.counter or self.model, name)

    def attribute(self, module: nn.Module, name: str) -> int:
        """Return a count of a module by its dotted name, such as "config.num_attention_heads".

        Raises:
            PolicyError: the attribute is missing, or is no positive integer.
        """
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
        """Return the value on a rank of an attribute that is proportional to a number of heads.

        Args:
            module: the module.
            name: dotted name of the attribute from the module.
            mine: number of heads on the rank.
            total: number of heads of the whole model.

        Raises:
            PolicyError: the attribute is missing, is no positive integer, or gives a fraction.
        """
        value = self.attribute(module, name)
        if value * mine % total:
            raise PolicyError(f"{self.who}: {name} = {value} is not proportional to its {total} heads")
        return value * mine // total
