"""Attention weights of a rank's own heads, gathered from all ranks only when something reads them.

Most modelling code hands attention weights on whether anybody asked for them or not, and drops them. All ranks run the
same code, so where one reads them all do, and gather together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parallelformers_ng.errors import ParallelError


class OwnHeads(Tensor):
    """A tensor with the shape of all heads. Whatever is computed from it is computed from all heads.

    Attributes:
        own: attention weights of this rank, as its attention reads them.
        head_dim, head_sizes: the dimension of heads, and how many of them each rank has.
    """

    own: Tensor
    head_dim: int
    head_sizes: Sequence[int]
    _gather: Callable[[], Tensor] | None
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, own: Tensor, dim: int, sizes: Sequence[int], gather: Callable[[], Tensor]) -> OwnHeads:
        """
        Args:
            own: attention weights of this rank.
            dim: its dimension of heads.
            sizes: heads of each rank.
            gather: gives the tensor of all heads; a collective.
        """
        shape = (*own.shape[:dim], sum(sizes), *own.shape[dim + 1 :])
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=own.dtype, device=own.device)
        self.own, self.head_dim, self.head_sizes = own, dim, sizes
        self._gather, self._whole = gather, None
        return self

    # All that counts comes to __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def whole(self) -> Tensor:
        """Return the tensor of all heads; gathered at the first call, which all ranks make."""
        if self._whole is None:
            assert self._gather is not None
            self._whole, self._gather = self._gather(), None
        return self._whole

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OwnHeads({tuple(self.own.shape)} of {tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParallelError(
            f"attention weights of shape {tuple(self.shape)} lie in an object of another kind. A rank has only its own"
            " heads, and gathers the others from a tuple, list, dict or model output; return them in one"
        )


def gathered(value: Any) -> Any:
    """Return a tensor of all heads in the place of one of a rank's own; anything else as it is."""
    return value.whole() if type(value) is OwnHeads else value


@dataclass(frozen=True)
class AllHeads:
    """An `OwnHeads` on its way to the ranks of other stages. Each takes its own heads of it."""

    whole: Tensor
    dim: int
    sizes: Sequence[int]

    @classmethod
    def of(cls, heads: OwnHeads) -> AllHeads:
        """Return a collective of the ranks of a stage."""
        return cls(heads.whole(), heads.head_dim, heads.head_sizes)

    def own_of(self, rank: int) -> OwnHeads:
        """Return the heads of rank `rank` of a stage; a rank without heads computes some of a copied one."""
        own = self.whole.narrow(self.dim, sum(self.sizes[:rank]) if self.sizes[rank] else 0, max(1, self.sizes[rank]))
        return OwnHeads(own, self.dim, self.sizes, lambda: self.whole)
