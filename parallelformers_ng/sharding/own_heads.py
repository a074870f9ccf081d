"""Returns attention weights that are gathered from all ranks only when code reads them.

Most modelling code returns attention weights even if no caller needs them. All ranks run the same code: if one rank
reads attention weights, all ranks read the same weights and can gather them in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parallelformers_ng.errors import ParallelError


class OwnHeads(Tensor):
    """Attention weights with the shape of all heads, of which only this rank's heads are in memory.

    Any operation on the tensor gathers all heads. Pickling and `copy` raise ParallelError.
    """

    own: Tensor  # attention weights of this rank's heads
    head_dim: int  # dimension of heads
    head_sizes: Sequence[int]  # number of heads of each rank
    whole: Callable[[], Tensor]  # returns the attention weights of all heads; the first call gathers them

    @staticmethod
    def __new__(cls, own: Tensor, dim: int, sizes: Sequence[int], gather: Callable[[], Tensor]) -> OwnHeads:
        shape = (*own.shape[:dim], sum(sizes), *own.shape[dim + 1 :])
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)
        self.own, self.head_dim, self.head_sizes = own, dim, sizes
        self.whole = cache(gather)
        return self

    # `__torch_dispatch__` sees every operation, so torch functions need no handling of their own.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, gathered, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OwnHeads({tuple(self.own.shape)} of {tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParallelError(
            f"attention weights of shape {tuple(self.shape)} are in an object from which ranks cannot gather all heads;"
            " return the weights in a tuple, list, dict or model output"
        )


def heads_of(whole: Tensor, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    """Return a view of one rank's heads; a rank without heads gets head 0.

    `whole` has all heads in dimension `dim`, and `sizes` has the number of heads of each rank.
    """
    return whole.narrow(dim, sum(sizes[:rank]) if sizes[rank] else 0, max(1, sizes[rank]))


def gathered(value: Any) -> Any:
    """Gather all heads if `value` is an `OwnHeads`, a collective; otherwise return `value`."""
    return value.whole() if type(value) is OwnHeads else value


@dataclass(frozen=True)
class AllHeads:
    """Attention weights of all heads, as one pipeline stage sends them to the ranks of all other stages."""

    whole: Tensor  # attention weights of all heads
    dim: int  # dimension of heads in `whole`
    sizes: Sequence[int]  # number of heads of each rank of a stage, 0 for a rank without heads

    @classmethod
    def of(cls, heads: OwnHeads) -> AllHeads:
        """Gather the attention weights of all heads; a collective of the ranks of a stage."""
        return cls(heads.whole(), heads.head_dim, heads.head_sizes)

    def own_of(self, rank: int) -> OwnHeads:
        """Return the attention weights for rank `rank` of a receiving stage."""
        return OwnHeads(heads_of(self.whole, self.dim, self.sizes, rank), self.dim, self.sizes, lambda: self.whole)
