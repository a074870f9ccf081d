"""The ShardPlan: for every tensor of a model, which slices of it each rank holds.

Pure data. It is built by `builder.py` from a policy, a skeleton and a world size; hand-over, loading, saving,
gathering, the memory report and the injector read it, and none of them computes a slice again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.partition import Range, width_of
from parallelformers_ng.sharding.table import human_bytes, pattern_of, table

if TYPE_CHECKING:
    from parallelformers_ng.offload.tiers import Tiers
    from parallelformers_ng.sharding.layers import ParallelLayer
    from parallelformers_ng.sharding.policy import Selection


@dataclass(frozen=True)
class Shard:
    """One rank's part of one tensor.

    Attributes:
        dim: the dimension that is cut, or None where the rank holds the whole tensor.
        ranges: the ranges held along `dim`, in the order in which they are laid side by side. They may repeat.
        zero: the rank holds zeros of that shape instead of the values: a bias that another rank adds, the output rows
            of a rank without heads.
    """

    dim: int | None = None
    ranges: tuple[Range, ...] = ()
    zero: bool = False

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        if self.dim is None:
            return whole
        return (*whole[: self.dim], width_of(self.ranges), *whole[self.dim + 1 :])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of `tensor`: a view where one range makes it up, else a new tensor."""
        if self.zero:
            return torch.zeros(self.shape(tuple(tensor.shape)), dtype=tensor.dtype, device=tensor.device)
        if self.dim is None:
            return tensor
        pieces = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return tensor.narrow(self.dim, 0, 0)
        return torch.cat(pieces, dim=self.dim)


_TOO_MUCH = 0.1
"""Above this share of bytes that every rank holds whole, the plan warns."""
WHOLE = Shard()
ZERO = Shard(zero=True)


@dataclass(frozen=True)
class TensorPlan:
    """What becomes of one parameter or buffer.

    Attributes:
        name: its dotted name in the model.
        shape: shape of the whole tensor.
        dtype: data type on the ranks, after the cast that was asked for.
        shards: one `Shard` per rank.
        storage: name under which its bytes are held; tied tensors that are cut alike share one.
        is_buffer: a buffer rather than a parameter.
        rule: the policy rule that cut it, for people; "" where it stays whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Shard, ...]
    storage: str
    is_buffer: bool = False
    rule: str = ""

    @property
    def is_replicated(self) -> bool:
        return all(shard == WHOLE for shard in self.shards)

    def bytes_on(self, rank: int) -> int:
        return bytes_of(self.shards[rank].shape(self.shape), self.dtype)

    @property
    def bytes_whole(self) -> int:
        return bytes_of(self.shape, self.dtype)


@dataclass(frozen=True)
class LayerPlan:
    """What the injector does to one module.

    Attributes:
        path: its dotted path.
        cls: the parallel layer that it becomes; None where only attributes change, as of a layer cut by its outputs.
        attributes: for each rank, the attributes to set (`out_features`, `num_heads`, `config.num_heads`, …).
    """

    path: str
    cls: type[ParallelLayer] | None
    attributes: tuple[dict[str, Any], ...]

    @property
    def takes_part(self) -> bool:
        """Whether its inputs differ from rank to rank."""
        return self.cls is not None and self.cls.takes_part

    @property
    def gives_part(self) -> bool:
        """Whether its outputs do."""
        return self.cls is None or self.cls.gives_part

    @property
    def kind(self) -> str:
        """How it is cut, for people."""
        return "column" if self.cls is None else re.sub(r"(?<=[a-z])(?=[A-Z])", " ", self.cls.__name__).lower()


@dataclass
class ShardPlan:
    """For every parameter and buffer of a model, which slices of it each rank holds.

    Attributes:
        model_class: name of the model's class.
        world_size: number of ranks.
        tensors: name → `TensorPlan`, in the model's order, tied tensors under each of their names.
        layers: what the injector does, in order.
        blocks: paths of the modules that the policies apply to, or that lie in one stage; what lies beneath one may
            hold only part of a result, or nothing.
        policy: names of the policies that apply.
        source: where they came from, as in `Selection`.
        cuttable: names of the tensors that belong to layers of a kind that can be cut (see `cut_share`).
        settings: attributes of the model that the cast changes besides its tensors, dotted name → value.
        cache: how ranks keep keys and values, as in `FitOptions`.
        quantized: name of a tensor that ranks hold in few bits → how.
        uncut: path of a module whose layers stay whole, although a policy names them → why.
        selection: the policies; None on the ranks.
        units: path of a module beneath which ranks compute parts → paths beneath it that these do not reach.
        misfits: name of one that was to be quantized and stays in high precision → why.
        strategy: how the ranks share the work, as in `FitOptions`.
        stages: runs of layers that follow one another, each on as many ranks, which have numbers beside each other.
        why: why that strategy was taken, where it was left open.
        tiers: where weights lie that have no room on the devices; None where all have.
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
        """Ranks of a stage: of stage s those from s times this on."""
        return self.world_size // self.stages

    @property
    def held(self) -> ShardPlan:
        """The plan of what the ranks hold: this one, but for integers and scales in the place of quantized tensors."""
        if not self.quantized:
            return self
        tensors = {part.name: part for name in self.tensors for part in self.parts(name)}
        matrices = self.cuttable & tensors.keys()
        return replace(self, tensors=tensors, quantized={}, cuttable=matrices)

    def parts(self, name: str) -> tuple[TensorPlan, ...]:
        """What ranks hold of a tensor: itself, or its integers and its scales."""
        tensor, encoding = self.tensors[name], self.quantized.get(name)
        return (tensor,) if encoding is None else encoding.parts(tensor)

    def bytes_held(self, name: str) -> int:
        """Bytes of a tensor, as ranks hold it."""
        return sum(part.bytes_whole for part in self.parts(name))

    @property
    def high_precision(self) -> dict[str, int]:
        """Tensors of more than one dimension that are not quantized: name → bytes, largest first."""
        left = {t.name: t.bytes_whole for t in self.stored() if t.name in self.cuttable - self.quantized.keys()}
        return dict(sorted(left.items(), key=lambda item: -item[1]))

    def stored(self) -> Iterator[TensorPlan]:
        """Every tensor once, tied ones under the name that holds the bytes."""
        return (tensor for name, tensor in self.tensors.items() if tensor.storage == name)

    def aliases(self) -> dict[str, list[str]]:
        """Storage name → every name whose bytes are held under it."""
        found: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            found.setdefault(tensor.storage, []).append(name)
        return found

    @property
    def bytes_whole(self) -> int:
        """Bytes of the whole model, after the cast and quantized."""
        return sum(tensor.bytes_whole for tensor in self.held.stored())

    @property
    def bytes_per_rank(self) -> list[int]:
        """Bytes of parameters and buffers on each rank."""
        stored = list(self.held.stored())
        return [sum(tensor.bytes_on(rank) for tensor in stored) for rank in range(self.world_size)]

    def bytes_on_device(self, rank: int) -> int:
        """Bytes of those that a rank has on its device all the time."""
        return self.bytes_per_rank[rank] if self.tiers is None else self.tiers.bytes_in("device", self, rank)

    @property
    def replicated(self) -> dict[str, int]:
        """Every tensor that all ranks hold whole: name → bytes, largest first."""
        whole = {tensor.name: tensor.bytes_whole for tensor in self.held.stored() if tensor.is_replicated}
        return dict(sorted(whole.items(), key=lambda item: -item[1]))

    @property
    def whole_share(self) -> float:
        """Share of all bytes that every rank holds whole, between 0 and 1."""
        return sum(self.replicated.values()) / max(1, self.bytes_whole)

    @property
    def warning(self) -> str:
        """A warning where a large share of the bytes is replicated; "" elsewhere."""
        if self.world_size == 1 or self.whole_share <= _TOO_MUCH:
            return ""
        largest = ", ".join(f"{name} ({human_bytes(size)})" for name, size in list(self.replicated.items())[:3])
        return (
            f"{self.whole_share:.0%} of the bytes of {self.model_class} stay whole on every rank, the largest being"
            f" {largest}; a policy may cut them (POLICY.md shows how)"
        )

    @property
    def why_uncut(self) -> str:
        """What the program's own code keeps whole, for people; "" if nothing."""
        if not self.uncut:
            return ""
        kinds: dict[str, str] = {}
        for path, reason in self.uncut.items():
            kinds.setdefault(pattern_of(f"{path}."), pattern_of(reason))
        parts = "; ".join(f"{path.strip('.')} ({reason})" for path, reason in [*kinds.items()][:3])
        return f"computed whole on every rank, as the code is not the libraries' own: {parts}"

    @property
    def cut_share(self) -> float:
        """Share of the cuttable bytes that are cut, between 0 and 1; 1 where there are none.

        Cuttable are all parameters of two and more dimensions, those of convolutions aside.
        """
        cuttable = [tensor for tensor in self.held.stored() if tensor.name in self.cuttable]
        total = sum(tensor.bytes_whole for tensor in cuttable)
        return sum(t.bytes_whole for t in cuttable if not t.is_replicated) / total if total else 1.0

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data: totals in bytes, and for each stored tensor its shape on every rank."""
        tensors = [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "rule": tensor.rule,
                "shapes": [list(shard.shape(tensor.shape)) for shard in tensor.shards],
            }
            for tensor in self.held.stored()
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
        """The plan for people."""
        return table(self)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"ShardPlan({self.model_class}, world_size={self.world_size}, {self.policy!r}, source={self.source!r})"


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize
