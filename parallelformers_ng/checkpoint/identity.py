"""Gives the tensors of a model other contents, so that each tensor stays the same Python object.

Optimizers, tied modules and the program's own variables refer to the objects.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
from torch import nn

# Attribute of a tensor whose values have left: an object that has the tensor's original content meanwhile.
_ORIGINAL = "_parallelformers_ng_original"
_VERSION = "_parallelformers_ng_version"
_OF_CONTENT = ("node", "_is_param")
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def become(tensor: Any, new: Any, keeps_values: bool = False) -> None:
    """Replace the content of a parameter or buffer; its attributes, hooks, gradient and `requires_grad` stay.

    The original content comes back with the values, so an autograd graph from before stays valid.

    Args:
        keeps_values: whether the original values stay in memory, because the program has a tensor that shares them.
    """
    with torch._C.DisableTorchFunctionSubclass():  # each access to a `RemoteTensor` would take longer
        _become(tensor, new, keeps_values)


def _become(tensor: Any, new: Any, keeps_values: bool) -> None:
    original = original_of(tensor)
    source = original if original is not None and tensor.device.type == "meta" else tensor
    gradient, hooks = source.grad if source.is_leaf else None, {name: getattr(tensor, name) for name in _HOOKS}
    if _has_values(new) and original is not None:
        _fill(original, new)
        if original.is_leaf:
            original.requires_grad_(tensor.requires_grad)
        new, original = original, None
    leaves = _has_values(tensor) and not _has_values(new) and not tensor.is_inference()
    # `torch.utils.swap_tensors` refuses weak references and autograd graphs. Both stay valid, because the content
    # comes back.
    torch._C._swap_tensor_impl(tensor, new)
    tensor.__class__, new.__class__ = new.__class__, tensor.__class__
    if leaves:
        original = new
        if keeps_values or new._use_count() > 1:
            vars(new)[_VERSION] = new._version
        else:
            new.data = torch.empty(0, dtype=new.dtype, device="cpu")
    attributes = {name: value for name, value in vars(new).items() if name in _OF_CONTENT}
    attributes |= {name: value for name, value in vars(tensor).items() if name not in (*_OF_CONTENT, _ORIGINAL)}
    vars(tensor).clear()
    vars(tensor).update(attributes if original is None else attributes | {_ORIGINAL: original})
    for name, hook in hooks.items():
        setattr(tensor, name, hook)
    if tensor.is_leaf and tensor.device.type != "meta":
        with contextlib.suppress(RuntimeError):  # a gradient of another data type
            tensor.grad = gradient


def _fill(original: torch.Tensor, values: torch.Tensor) -> None:
    """Put values into an object with a tensor's original content. Values that stayed in memory and that the program has
    changed meanwhile are newer."""
    if not original.nbytes or original.dtype != values.dtype:
        original.data = values
    elif not is_written(original) and not torch.equal(original, values):  # a write would invalidate autograd graphs
        with torch.no_grad():
            original.copy_(values)


def original_of(tensor: torch.Tensor) -> Any:
    return vars(tensor).get(_ORIGINAL)


def is_written(original: torch.Tensor) -> bool:
    """Return whether the program has changed, through another tensor, original values that stayed in memory."""
    return vars(original).get(_VERSION, original._version) != original._version


class SharedMemory:
    """Tells which tensors of a model share their memory with other tensors of the program, such as a state dict."""

    def __init__(self, model: nn.Module) -> None:
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
        self._own = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors if _has_values(tensor))

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether another tensor of the program has the memory of a tensor; the tensor must leave next."""
        if not _has_values(tensor):
            return False
        storage = tensor.untyped_storage()
        users = torch._C._storage_Use_Count(storage._cdata) - 1 - self._own[storage.data_ptr()]
        self._own[storage.data_ptr()] -= users <= 0
        return users > 0


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
