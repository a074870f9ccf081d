"""What the parallel layers share. Each is the layer it replaces plus an exchange between the ranks.

`inject.py` gives a module the class of its parallel layer in front of its own, so that whatever else the module carries
(hooks, attributes, a subclass's own forward) stays as it was.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.collectives.communicator import Communicator


class ParallelLayer(nn.Module):
    """Base of the parallel layers.

    Attributes:
        takes_part, gives_part: whether its inputs, its outputs differ from rank to rank: they are one rank's columns,
            heads or partial sums. Where they do not, all ranks have the same.
        renews: whether its forward stands for the layer's own, which it does not call.
        communicator: what this rank's layers exchange through: all ranks, or those of its stage.
    """

    takes_part: ClassVar[bool] = True
    gives_part: ClassVar[bool] = True
    renews: ClassVar[bool] = False
    communicator: Communicator

    def connect(self, everyone: Communicator, width: int) -> None:
        """Called by the injector.

        Args:
            everyone: what all ranks exchange through.
            width: ranks of a stage, beside each other; all where there are no stages.
        """
        self.communicator = everyone.within(width)

    if TYPE_CHECKING:
        # It is mixed into a layer and has whatever that has: `weight`, `norms`, ….
        def __getattr__(self, name: str) -> Any: ...


@cache
def parallel_class(kind: type[ParallelLayer], layer: type[nn.Module]) -> type[nn.Module]:
    """`RowParallel` + `Linear` → `RowParallelLinear`, a class made once. That of a model keeps the model's name, under
    which transformers knows which outputs it records."""
    name = layer.__name__ if issubclass(layer, PreTrainedModel) else f"{kind.__name__}{layer.__name__}"
    return type(name, (kind, layer), {"__module__": layer.__module__})
