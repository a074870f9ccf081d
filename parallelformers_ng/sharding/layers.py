"""Defines the base class of parallel layers. A parallel layer is an ordinary layer plus an exchange between ranks.

`inject.py` puts the class of the parallel layer before the module's own class. The module's hooks, attributes and own
forward stay unchanged.
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

    # whether the layer's inputs differ between ranks: columns, heads or partial sums of one rank
    takes_part: ClassVar[bool] = True
    # whether the layer's outputs differ between ranks: columns, heads or partial sums of one rank
    gives_part: ClassVar[bool] = True
    # whether the parallel layer's forward replaces the ordinary layer's forward without calling it
    renews: ClassVar[bool] = False
    communicator: Communicator  # communicator of this rank's layers: all ranks, or the ranks of its stage

    def connect(self, everyone: Communicator, width: int) -> None:
        """Set the layer's communicator; the injector calls this method."""
        self.communicator = everyone.within(width)

    if TYPE_CHECKING:
        # A parallel layer also inherits from an ordinary layer and has its attributes: `weight`, `norms`, ….
        def __getattr__(self, name: str) -> Any: ...


@cache
def parallel_class(kind: type[ParallelLayer], layer: type[nn.Module]) -> type[nn.Module]:
    """Return the class that inherits first from `kind`, then from `layer`: `RowParallel` + `Linear` →
    `RowParallelLinear`.

    The class of a model keeps the model's name and module, because transformers looks up recorded outputs by both.
    """
    name = layer.__name__ if issubclass(layer, PreTrainedModel) else f"{kind.__name__}{layer.__name__}"
    return type(name, (kind, layer), {"__module__": layer.__module__})


@dataclass(frozen=True)
class LayerPlan:
    """A job of the injector: the changes to one module on each rank."""

    path: str  # dotted path of the module
    # parallel layer that the module becomes; None if only attributes change, as in a column-parallel layer
    cls: type[ParallelLayer] | None
    # for each rank, dotted name of an attribute (`out_features`, `config.num_heads`, …) → value to set
    attributes: tuple[dict[str, Any], ...]

    @property
    def takes_part(self) -> bool:
        """Whether `cls` takes inputs that differ between ranks; False if `cls` is None."""
        return self.cls is not None and self.cls.takes_part

    @property
    def gives_part(self) -> bool:
        """Whether the layer's outputs differ between ranks; True if `cls` is None."""
        return self.cls is None or self.cls.gives_part

    @property
    def kind(self) -> str:
        """Kind of cut as text for people, such as "column" or "row parallel"."""
        return "column" if self.cls is None else re.sub(r"(?<=[a-z])(?=[A-Z])", " ", self.cls.__name__).lower()
