"""Defines the base class of parallel layers. A parallel layer is an ordinary layer plus an exchange between ranks.

`inject.py` gives a module a new class that inherits from the parallel layer, then from the module's own class. The
module keeps its hooks and attributes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.collectives.communicator import Communicator


class ParallelLayer(nn.Module):
    """Base of the parallel layers.

    A layer that exchanges data with other ranks raises CollectiveAbortedError and DivergedError as
    `Communicator.all_reduce` does.
    """

    # Whether each rank calls the layer with different inputs: its columns, its heads or its partial sums.
    takes_part: ClassVar[bool] = True
    # Whether the layer returns different outputs on each rank: its columns, its heads or its partial sums.
    gives_part: ClassVar[bool] = True
    # Whether the parallel layer's forward replaces the ordinary layer's forward instead of calling it.
    renews: ClassVar[bool] = False
    communicator: Communicator  # connects the ranks that share the layer: all ranks, or the ranks of one stage

    def connect(self, everyone: Communicator, width: int) -> None:
        """Set the layer's communicator to the stage of `width` ranks that this rank belongs to."""
        self.communicator = everyone.within(width)

    if TYPE_CHECKING:
        # For mypy: `parallel_class` adds an ordinary layer as second base, with attributes such as `weight`.
        def __getattr__(self, name: str) -> Any: ...


@cache
def parallel_class(kind: type[ParallelLayer], layer: type[nn.Module]) -> type[nn.Module]:
    """Return a class that inherits first from `kind`, then from `layer`, such as `RowParallelLinear`.

    For a whole model, the new class keeps the model's name, because transformers looks up recorded outputs by it.
    """
    name = layer.__name__ if issubclass(layer, PreTrainedModel) else f"{kind.__name__}{layer.__name__}"
    return type(name, (kind, layer), {"__module__": layer.__module__})


@dataclass(frozen=True)
class LayerPlan:
    """The changes that `inject` makes to one module on each rank: a new class and new values of attributes."""

    path: str  # dotted path of the module
    # parallel layer that the module becomes; None if only attributes change, as in a column-parallel layer
    cls: type[ParallelLayer] | None
    # for each rank, dotted name of an attribute (`out_features`, `config.num_heads`, …) → value to set
    attributes: tuple[dict[str, Any], ...]

    @property
    def takes_part(self) -> bool:
        """Whether each rank calls the layer with different inputs; False for a column-parallel layer (`cls` None)."""
        return self.cls is not None and self.cls.takes_part

    @property
    def gives_part(self) -> bool:
        """Whether the layer returns different outputs on each rank; True for a column-parallel layer (`cls` None)."""
        return self.cls is None or self.cls.gives_part

    @property
    def kind(self) -> str:
        """How the layer is cut, as text for people, such as "column" or "row parallel"."""
        return "column" if self.cls is None else re.sub(r"(?<=[a-z])(?=[A-Z])", " ", self.cls.__name__).lower()
