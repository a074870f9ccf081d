"""Tensors that can be read like ordinary ones, but not written: whole weights that were gathered from the workers.

The entries of a model's state dict share the memory of its weights, and programs change weights through the entries.
An entry that was gathered is a copy, so a change would be lost.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from parallelformers_ng.errors import ParallelError

_AS_PLAIN = (torch.Tensor.__reduce_ex__, torch.Tensor.__repr__, torch.Tensor.__format__)
_ARRAYS = (torch.Tensor.numpy, torch.Tensor.__array__)


class ReadOnlyTensor(torch.Tensor):
    """A tensor whose values cannot be changed, neither directly, nor through a view or a NumPy array of it.

    In-place operations raise ParallelError. Copies, results of operations, saved tensors and parameters made from the
    tensor are ordinary, writable tensors.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_is_param":  # `nn.Parameter(tensor)` sets this attribute on a subclass to make it a parameter
            self.__class__ = torch.nn.Parameter  # type: ignore[assignment]
        else:
            super().__setattr__(name, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.__dlpack__:
                raise _refusal("a DLPack capsule")
            if func is torch.Tensor.__deepcopy__:
                return copy.deepcopy(args[0].as_subclass(torch.Tensor), *args[1:])
            if func in _AS_PLAIN:
                return func(args[0].as_subclass(torch.Tensor), *args[1:], **kwargs)
            sources = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, cls)]
            # Empty tensors, which have no values to protect, have the address 0.
            addresses = {tensor.untyped_storage().data_ptr() for tensor in sources} - {0}
            with _Refusing(addresses):
                result = func(*args, **kwargs)
            if func in _ARRAYS and result.ctypes.data == args[0].data_ptr():
                result.flags.writeable = False
            return tree_map_only(torch.Tensor, lambda tensor: _like_source(tensor, addresses), result)


class _Refusing(TorchDispatchMode):
    def __init__(self, addresses: set[int]) -> None:
        super().__init__()
        self._addresses = addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        targets = written(func, args, kwargs or {}) if func._schema.is_mutable else ()
        if any(tensor.untyped_storage().data_ptr() in self._addresses for tensor in targets):
            raise _refusal(f"{func._schema.name.partition('::')[2]}()")
        return func(*args, **kwargs or {})


def written(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the arguments to which a torch operator writes, according to its schema."""
    by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    names = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    leaves = tree_leaves([by_name[name] for name in by_name if name in names])
    return [tensor for tensor in leaves if isinstance(tensor, torch.Tensor)]


def _like_source(tensor: torch.Tensor, addresses: set[int]) -> torch.Tensor:
    if isinstance(tensor, ReadOnlyTensor) or tensor.untyped_storage().data_ptr() not in addresses:
        return tensor
    return tensor.as_subclass(ReadOnlyTensor)


def _refusal(what: str) -> ParallelError:
    return ParallelError(
        f"{what} would change a weight that was gathered from the workers of a parallelized model, and the model would"
        " not have the change. Call deparallelize() first, or change a clone()"
    )
