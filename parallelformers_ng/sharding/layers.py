"""The base of the parallel layers. Each is the layer it replaces plus an exchange between the ranks.

`inject.py` gives a module the class of its parallel layer in front of its own, so that whatever else the module carries
(hooks, attributes, a subclass's own forward) stays as it was.
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

    Attributes:
        takes_part, gives_part: whether its inputs, its outputs differ between ranks: columns,
            heads or partial sums of one rank. If not, all ranks have the same.
        renews: whether its forward stands for the layer's own, which it does not call.
        communicator: communicator of this rank's layers: all ranks, or the ranks of its stage.
    """

    takes_part: ClassVar[bool] = True
    gives_part: ClassVar[bool] = True
    renews: ClassVar[bool] = False
    communicator: Communicator

    def connect(self, everyone: Communicator, width: int) -> None:
        """Called by the injector.

        Args:
            everyone: communicator of all ranks.
            width: ranks of a stage, beside each other; all if there are no stages.
        """
        self.communicator = everyone.within(width)

    if TYPE_CHECKING:
        # It is mixed into a layer and has whatever that has: `weight`, `norms`, ….
        def __getattr__(self, name: str) -> Any: ...


@cache
def parallel_class(kind: type[ParallelLayer], layer: type[nn.Module]) -> type[nn.Module]:
    """`RowParallel` + `Linear` → `RowParallelLinear`, a class made once. The class of a model keeps the model's
    name: transformers looks up recorded outputs by it."""
    name = layer.__name__ if issubclass(layer, PreTrainedModel) else f"{kind.__name__}{layer.__name__}"
    return type(name, (kind, layer), {"__module__": layer.__module__})


@dataclass(frozen=True)
class LayerPlan:
    """The injector's job for one module.

    Attributes:
        path: its dotted path.
        cls: the parallel layer that it becomes; None if only attributes change, as of a layer cut by its outputs.
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
