"""What the parallel layers share. Each is the layer it replaces plus an exchange between the ranks.

`inject.py` gives a module the class of its parallel layer in front of its own, so that whatever else the module carries
(hooks, attributes, a subclass's own forward) stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.traced import all_reduce


class ParallelLayer(nn.Module):
    """Base of the parallel layers.

    Attributes:
        takes_part, gives_part: whether its inputs, its outputs differ from rank to rank: they are one rank's columns,
            heads or partial sums. Where they do not, all ranks have the same.
        communicator: what this rank's layers exchange through; set by the injector.
    """

    takes_part: ClassVar[bool] = True
    gives_part: ClassVar[bool] = True
    communicator: Communicator

    if TYPE_CHECKING:
        # It is mixed into a layer and has whatever that has: `weight`, `norms`, ….
        def __getattr__(self, name: str) -> Any: ...


class Reduced(ParallelLayer):
    """Sums what a module with cut parameters gives: its output, or the first item of a tuple of outputs."""

    takes_part = False
    gives_part = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return on_tensor(super().forward(*args, **kwargs), partial(all_reduce, self.communicator))


def on_tensor(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change an output, or the first item of a tuple of outputs."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


@cache
def parallel_class(kind: type[ParallelLayer], layer: type[nn.Module]) -> type[nn.Module]:
    """`RowParallel` + `Linear` → `RowParallelLinear`, a class made once."""
    return type(f"{kind.__name__}{layer.__name__}", (kind, layer), {"__module__": layer.__module__})
