"""Lists of one number as indices, `x[..., [-1], :]`, as modelling code has them in steps of decoding.

torch makes a tensor of the list and copies it to the device of `x`, each time: the host waits for the copy, and nothing
that has it can be recorded. A slice selects the same, and needs no copy.

A class with a `__getitem__` written in Python is a sequence to C (`sq_item`), for good. `torch.tensor([a, b])` would
then ask tensors without dimensions for their length, an error; Qwen's vision models make such lists. So these tensors
become numbers first, as in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_BASIC = {int, slice, type(None), type(...)}
"""Kinds of index that select alike beside a list and beside a slice."""


def slice_single_indices() -> None:
    """Have a list of one number index the tensors of this process as a slice does, from now on. Idempotent."""
    if not hasattr(Tensor.__getitem__, "__wrapped__"):
        Tensor.__getitem__ = _sliced(Tensor.__getitem__)  # type: ignore[method-assign, assignment]
        torch.tensor, torch.as_tensor = _of_numbers(torch.tensor), _of_numbers(torch.as_tensor)


def _sliced(usual: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    @functools.wraps(usual)
    def indexed(tensor: Tensor, index: Any) -> Tensor:
        items = index if type(index) is tuple else (index,)
        if [*map(type, items)].count(list) != 1:
            return usual(tensor, index)
        slices = tuple(map(_slice, items))
        part = usual(tensor, slices) if _BASIC.issuperset(map(type, slices)) else None
        # It is a copy, as that of a list. If the number is out of range, nothing is selected, and the error of a list
        # says so.
        return usual(tensor, index) if part is None or not part.numel() else part.clone()

    return indexed


def _of_numbers(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(usual)
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
    """Return the slice that selects what a list of one number does; anything else as it is."""
    if type(item) is not list or len(item) != 1 or type(item[0]) is not int:
        return item
    return slice(item[0], item[0] + 1 or None)
