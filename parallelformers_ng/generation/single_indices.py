"""Replaces indices that are a list of one number, `x[..., [-1], :]`, by slices, which need no copy to the device.

Model code uses such indices in decode steps. torch makes a tensor of the list, and copies the tensor to the device of
`x` at each use. The host waits for that copy, and a step with that copy cannot be recorded as a CUDA graph.

A `Tensor.__getitem__` in Python makes C code see tensors as sequences (`sq_item`) until the process ends. Then
`torch.tensor([a, b])` raises an error if `a` and `b` are tensors without dimensions, which have no length. Qwen's
vision models make such lists. So this module makes `torch.tensor` convert tensors in a list to numbers first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from parallelformers_ng.generation.wrapping import wrap_once

# If all other indices are of these types, the index `[n]` selects the same elements as the slice `n : n + 1`.
_BASIC = {int, slice, type(None), type(...)}


def slice_single_indices() -> None:
    """Patch `Tensor.__getitem__` to use a slice for a list of one number, as in `x[:, [-1]]`. Idempotent."""
    wrap_once(Tensor, "__getitem__", _sliced)
    wrap_once(torch, "tensor", _of_numbers)
    wrap_once(torch, "as_tensor", _of_numbers)


def _sliced(usual: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    def indexed(tensor: Tensor, index: Any) -> Tensor:
        items = index if type(index) is tuple else (index,)
        if [*map(type, items)].count(list) != 1:
            return usual(tensor, index)
        slices = tuple(map(_slice, items))
        part = usual(tensor, slices) if _BASIC.issuperset(map(type, slices)) else None
        # Clone, because a list index returns a copy. An empty slice means out of range: the list then raises the error.
        return usual(tensor, index) if part is None or not part.numel() else part.clone()

    return indexed


def _of_numbers(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def tensor(data: Any, *types: Any, **options: Any) -> Tensor:
        leaves = tree_leaves(data) if isinstance(data, (list, tuple)) else []
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            if not types and options.get("dtype") is None:
                kinds = [(leaf if isinstance(leaf, Tensor) else usual(leaf)).dtype for leaf in leaves]
                options["dtype"] = functools.reduce(torch.promote_types, kinds)
            data = tree_map_only(Tensor, Tensor.item, data)
        return usual(data, *types, **options)

    return tensor


def _slice(item: Any) -> Any:
    """Return the slice that selects the same as a list of one number; return any other index unchanged."""
    if type(item) is not list or len(item) != 1 or type(item[0]) is not int:
        return item
    return slice(item[0], item[0] + 1 or None)
