"""Gives the tensors of a model other contents, so that each tensor stays the same Python object.

Optimizers, tied modules and the program's own variables refer to the objects.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
from torch import nn

# While a tensor's values are on the workers, this attribute keeps the tensor's original content, as another tensor.
_ORIGINAL = "_parallelformers_ng_original"
_VERSION = "_parallelformers_ng_version"
_OF_CONTENT = ("node", "_is_param")
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def become(tensor: Any, new: Any, keeps_values: bool = False) -> None:
    """Give a parameter or buffer the content of `new`; its attributes, hooks, gradient and `requires_grad` stay.

    If `new` has no values (`meta` or lazy), the original `TensorImpl` is kept, and a later call with values puts it
    back. So autograd graphs that refer to the tensor stay valid.

    Args:
        keeps_values: whether the original values stay in memory, because another tensor of the program shares them.
    """
    with torch._C.DisableTorchFunctionSubclass():  # `RemoteTensor.__torch_function__` would slow each access
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
    # Not `torch.utils.swap_tensors`: it refuses tensors with weak references or in autograd graphs. Both stay valid
    # here, because the original content comes back.
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
        with contextlib.suppress(RuntimeError):  # torch refuses a gradient whose data type differs from the tensor's
            tensor.grad = gradient


def _fill(original: torch.Tensor, values: torch.Tensor) -> None:
    """Write values back into a tensor's original content. If the original values stayed in memory and the program has
    changed them meanwhile, they are newer and stay."""
    if not original.nbytes or original.dtype != values.dtype:
        original.data = values
    # Equal values are not written, because each write increases `_version`, which invalidates autograd graphs.
    elif not is_written(original) and not torch.equal(original, values):
        with torch.no_grad():
            original.copy_(values)


def original_of(tensor: torch.Tensor) -> Any:
    return vars(tensor).get(_ORIGINAL)


def is_written(original: torch.Tensor) -> bool:
    """Return whether the program has written to the original values since they were replaced (`_version` differs)."""
    return vars(original).get(_VERSION, original._version) != original._version


class SharedMemory:
    """Tells which tensors of a model share their memory with other tensors of the program, such as a state dict."""

    def __init__(self, model: nn.Module) -> None:
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
        self._own = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors if _has_values(tensor))

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether tensors outside the model share the memory of `tensor`.

        The caller must take `tensor` out of the model afterwards, because later calls do not count it.
        """
        if not _has_values(tensor):
            return False
        storage = tensor.untyped_storage()
        users = torch._C._storage_Use_Count(storage._cdata) - 1 - self._own[storage.data_ptr()]
        self._own[storage.data_ptr()] -= users <= 0
        return users > 0


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
