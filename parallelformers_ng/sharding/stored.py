"""Shards parameters and buffers over the ranks for storage, and gathers them each time that code reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.draft import Draft
from parallelformers_ng.sharding.layers import ParallelLayer
from parallelformers_ng.sharding.partition import width_of
from parallelformers_ng.sharding.policy import Rule
from parallelformers_ng.sharding.tensors import dotted


@dataclass(frozen=True)
class Stored(Rule):
    """Shard a module's tensors by rows, and gather all rows at every read. For tables that code reads as a whole, such
    as a codebook that is searched, or position embeddings that are interpolated.

    Args:
        names: names of the module's parameters and buffers to shard. The forward must not write to a sharded tensor.
    """

    names: tuple[str, ...] = ("weight",)

    def apply(self, draft: Draft, path: str) -> None:
        for name in self.names:
            store(draft, path, name, 0)


def store(draft: Draft, path: str, name: str, dim: int) -> None:
    """Record in the draft that a parameter or buffer is sharded along `dim` and gathered at every read."""
    tensor = draft.tensor(dotted(path, name))
    if tensor is None:
        raise PolicyError(f"{type(draft.modules[path]).__name__} has no parameter or buffer {name!r}")
    ranges = draft.ranges(tensor.shape[dim])
    draft.cut(dotted(path, name), dim, ranges)
    known = draft.layers.get((path, StoredInParts, "stored"))
    before = known.attributes[0]["stored"] if known else {}
    stored = {**before, name: (dim, tuple(map(width_of, ranges)))}
    draft.layer(path, StoredInParts, stored=stored)


class StoredInParts(ParallelLayer):
    """A module with parameters and buffers that are sharded over the ranks and gathered at every read.

    A read is a collective, so all ranks must read the same tensor at the same time.
    """

    takes_part = False
    gives_part = False
    # name of a tensor → its sharded dimension, and the size of that dimension on each rank
    stored: Mapping[str, tuple[int, Sequence[int]]]

    @property
    def _flat_weights(self) -> list[torch.Tensor]:
        """Gathered parameters of a recurrent layer: torch's LSTM and GRU read their parameters from this list."""
        return [getattr(self, name) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, weights: list[torch.Tensor]) -> None:
        """Ignore the list that torch sets, because it contains shards."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # `nn.Module.__getattr__` looks up parameters
        if name not in self.__dict__.get("stored", ()):
            return value
        dim, sizes = self.stored[name]
        if value.shape[dim] != sizes[self.communicator.rank]:
            return value  # the modelling code has replaced the shard by a new tensor
        return self.communicator.all_gather(value, dim, sizes)
