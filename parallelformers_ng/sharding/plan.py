"""Defines the `ShardPlan`: the slices of every tensor of a model for each rank.

The plan is pure data. `builder.py` builds it from policies, a skeleton and a world size. Hand-over, loading, saving,
gathering, the memory report and the injector read the slices from the plan and compute no slices themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.layers import LayerPlan
from parallelformers_ng.sharding.policy import Selection
from parallelformers_ng.sharding.tensor_plan import TensorPlan
from parallelformers_ng.sharding.tiers import Place, Tiers
from parallelformers_ng.sharding.wording import human_bytes, pattern_of, tensor_table

_MAX_REPLICATED = 0.1  # the plan warns if a larger fraction of the model's bytes is replicated


@dataclass
class ShardPlan:
    """The slices of every parameter and buffer of a model for each rank.

    Attributes:
        model_class: name of the model's class.
        world_size: number of ranks.
        tensors: name → `TensorPlan`, in the model's order; tied tensors have an entry for each name.
        layers: changes that `inject` makes to modules, in order.
        blocks: paths of the modules that the policies apply to, or that one stage computes.
        policy: names of the policies that apply.
        source: origin of the policies, as in `Selection`.
        cuttable: names of parameters with two or more dimensions, except those of convolutions.
        settings: attributes of the model that the cast changes besides tensors: dotted name → value.
        cache: how ranks keep keys and values, as in `FitOptions`.
        quantized: name of a quantized tensor → its encoding.
        uncut: module path → why layers in the module stay whole although a policy has rules for them.
        selection: the policies; None on the ranks.
        units: path of a module in which each rank computes a part of a result → paths of modules in it whose parts
            belong to another result.
        misfits: name of a tensor that should be quantized → why it stays in high precision.
        strategy: how the ranks share the work, as in `FitOptions`.
        stages: number of stages, each a run of consecutive layers. All stages have equally many ranks, with
            consecutive numbers.
        why: reason for the strategy, if the caller did not choose a strategy.
        tiers: where each rank keeps weights that do not fit on its device; None if all weights fit.
    """

    model_class: str
    world_size: int
    tensors: dict[str, TensorPlan]
    layers: list[LayerPlan]
    blocks: list[str]
    policy: str
    source: str
    cuttable: frozenset[str] = field(default_factory=frozenset)
    settings: dict[str, Any] = field(default_factory=dict)
    cache: str | None = None
    quantized: dict[str, Encoding] = field(default_factory=dict)
    misfits: dict[str, str] = field(default_factory=dict)
    uncut: dict[str, str] = field(default_factory=dict)
    units: dict[str, tuple[str, ...]] = field(default_factory=dict)
    selection: Selection | None = None
    strategy: str = "tensor"
    stages: int = 1
    why: str = ""
    tiers: Tiers | None = None

    @property
    def stage_width(self) -> int:
        """Number of ranks of each stage."""
        return self.world_size // self.stages

    @property
    def as_stored(self) -> ShardPlan:
        """The same plan for the tensors in memory: each quantized tensor becomes quantized numbers and scales."""
        if not self.quantized:
            return self
        tensors = {part.name: part for name in self.tensors for part in self.parts(name)}
        matrices = self.cuttable & tensors.keys()
        return replace(self, tensors=tensors, quantized={}, cuttable=matrices)

    def parts(self, name: str) -> tuple[TensorPlan, ...]:
        """Return the plans of the tensors that store a tensor: itself, or its quantized numbers and its scales."""
        tensor, encoding = self.tensors[name], self.quantized.get(name)
        return (tensor,) if encoding is None else encoding.parts(tensor)

    def bytes_held(self, name: str) -> int:
        """Return the bytes of a whole tensor in the form that ranks store, quantized or not."""
        return sum(part.bytes_whole for part in self.parts(name))

    @property
    def high_precision(self) -> dict[str, int]:
        """Cuttable tensors that are not quantized: name → bytes of the whole tensor, largest first."""
        left = {t.name: t.bytes_whole for t in self.stored() if t.name in self.cuttable - self.quantized.keys()}
        return dict(sorted(left.items(), key=lambda item: -item[1]))

    def stored(self) -> Iterator[TensorPlan]:
        """Yield the plan of every tensor; tied tensors that share memory are yielded once."""
        return (tensor for name, tensor in self.tensors.items() if tensor.storage == name)

    def aliases(self) -> dict[str, list[str]]:
        """Return the names of the tied tensors that share memory, by the name under which they are stored."""
        names_by_storage: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            names_by_storage.setdefault(tensor.storage, []).append(name)
        return names_by_storage

    @property
    def bytes_whole(self) -> int:
        """Bytes of the whole model, after the cast and the quantization."""
        return sum(tensor.bytes_whole for tensor in self.as_stored.stored())

    @property
    def bytes_per_rank(self) -> list[int]:
        """Bytes of each rank's parameters and buffers after the cast and the quantization, also in RAM and on disk."""
        stored = list(self.as_stored.stored())
        return [sum(tensor.bytes_on(rank) for tensor in stored) for rank in range(self.world_size)]

    def bytes_in(self, place: Place, rank: int) -> int:
        """Return the bytes of a rank's tensors that are stored in one place: on its device, in RAM or on disk."""
        tiers, total = self.tiers, self.bytes_per_rank[rank]
        if tiers is None:
            return total if place == "device" else 0
        return sum(
            tensor.bytes_on(rank) for tensor in self.as_stored.stored() if tiers.place(tensor.name, rank) == place
        )

    def bytes_moved(self, rank: int) -> int:
        """Return the bytes of offloaded weights that a rank loads when all layers run once, as in a decode step."""
        tensors, moved = self.as_stored.tensors, () if self.tiers is None else self.tiers.moved(rank)
        return sum(tensors[name].bytes_on(rank) for _, names in moved for name in names)

    @property
    def replicated(self) -> dict[str, int]:
        """Replicated tensors: name → bytes, largest first."""
        whole = {tensor.name: tensor.bytes_whole for tensor in self.as_stored.stored() if tensor.is_replicated}
        return dict(sorted(whole.items(), key=lambda item: -item[1]))

    @property
    def whole_share(self) -> float:
        """Fraction of all bytes that is replicated, between 0 and 1."""
        return sum(self.replicated.values()) / max(1, self.bytes_whole)

    @property
    def warning(self) -> str:
        """A warning if more than 10 % of the bytes are replicated on several ranks; "" otherwise."""
        if self.world_size == 1 or self.whole_share <= _MAX_REPLICATED:
            return ""
        largest = ", ".join(f"{name} ({human_bytes(size)})" for name, size in list(self.replicated.items())[:3])
        return (
            f"{self.whole_share:.0%} of the bytes of {self.model_class} stay whole on every rank, the largest being"
            f" {largest}; a policy may cut them (POLICY.md shows how)"
        )

    @property
    def why_uncut(self) -> str:
        """Text for people: why modules in `uncut` stay whole, for at most three kinds of modules; "" if none do."""
        if not self.uncut:
            return ""
        kinds: dict[str, str] = {}
        for path, reason in self.uncut.items():
            kinds.setdefault(pattern_of(f"{path}."), pattern_of(reason))
        parts = "; ".join(f"{path.strip('.')} ({reason})" for path, reason in [*kinds.items()][:3])
        return f"computed whole on every rank, because of foreign code or because a policy does not fit: {parts}"

    @property
    def cut_share(self) -> float:
        """Fraction of the cuttable bytes that is cut, between 0 and 1; 1 if no bytes are cuttable.

        All parameters of two or more dimensions are cuttable, except those of convolutions.
        """
        cuttable = [tensor for tensor in self.as_stored.stored() if tensor.name in self.cuttable]
        total = sum(tensor.bytes_whole for tensor in cuttable)
        return sum(t.bytes_whole for t in cuttable if not t.is_replicated) / total if total else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data: totals in bytes, fractions, and each stored tensor's shape on every rank."""
        tensors = [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "rule": tensor.rule,
                "shapes": [list(shard.shape(tensor.shape)) for shard in tensor.shards],
            }
            for tensor in self.as_stored.stored()
        ]
        return {
            "model": self.model_class,
            "world_size": self.world_size,
            "strategy": self.strategy,
            "policy": self.policy,
            "source": self.source,
            "bytes_whole": self.bytes_whole,
            "bytes_per_rank": self.bytes_per_rank,
            "cut_share": self.cut_share,
            "whole_share": self.whole_share,
            "replicated": self.replicated,
            "cache": self.cache,
            "quantized": {name: encoding.kind for name, encoding in self.quantized.items()},
            "misfits": self.misfits,
            "uncut": self.uncut,
            "places": None if self.tiers is None else self.tiers.places,
            "tensors": tensors,
        }

    def table(self) -> str:
        """Return the plan as text for people: totals, and one line for each kind of tensor."""
        per_rank = "  ".join(f"rank {rank}: {human_bytes(size)}" for rank, size in enumerate(self.bytes_per_rank))
        lines = [
            f"{self.model_class} on {self.world_size} ranks, policy {self.policy} ({self.source})",
            f"whole: {human_bytes(self.bytes_whole)}  {per_rank}",
            f"cut: {self.cut_share:.1%} of the cuttable bytes, {1 - self.whole_share:.1%} of all"
            f"  replicated: {human_bytes(sum(self.replicated.values()))}",
            f"strategy: {self.strategy}, {self.why}" if self.why else "",
            *self._tiers_in_words(),
            f"keys and values: {self.cache}" if self.cache else "",
            *self._quantization_in_words(),
            f"warning: {self.warning}" if self.warning else "",
            self.why_uncut,
        ]
        return "\n".join([*filter(None, lines), tensor_table(self.as_stored.stored())])

    def _tiers_in_words(self) -> Iterator[str]:
        """Yield a line for each rank with its bytes by place; yield no line if all weights are on the devices."""
        for rank in range(self.world_size) if self.tiers else ():
            device, ram, disk = (human_bytes(self.bytes_in(place, rank)) for place in get_args(Place))
            moved = human_bytes(self.bytes_moved(rank))
            yield f"rank {rank}: {device} on its device, {ram} in RAM, {disk} on disk; {moved} moved for each token"

    def _quantization_in_words(self) -> Iterator[str]:
        if not self.quantized and not self.misfits:
            return
        kinds = ", ".join(sorted({encoding.kind for encoding in self.quantized.values()})) or "quantized"
        size = sum(self.bytes_held(tensor.name) for tensor in self.stored() if tensor.name in self.quantized)
        patterns: dict[str, int] = {}
        for name, count in self.high_precision.items():
            patterns[pattern_of(name)] = patterns.get(pattern_of(name), 0) + count
        left = ", ".join(f"{pattern} ({human_bytes(count)})" for pattern, count in patterns.items())
        yield f"{kinds}: {human_bytes(size)}  in high precision: {left or 'none'}"
        reasons = {pattern_of(name): why for name, why in self.misfits.items()}
        yield from (f"not quantized: {pattern} ({why})" for pattern, why in reasons.items())

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"ShardPlan({self.model_class}, world_size={self.world_size}, {self.policy!r}, source={self.source!r})"
