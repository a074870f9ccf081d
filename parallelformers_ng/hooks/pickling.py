"""Pickles all hooks of a call together and by value, so that objects that hooks share stay shared on the workers.

The pickle refers to modules of the model by path: a worker uses its own modules. A `Handle` replaces an object
that only exists in the caller's process, such as the handle of a cache.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.generation.cache_handle import CacheHandle
from parallelformers_ng.generation.call_arguments import code_of
from parallelformers_ng.generation.object_messages import Changes, Given
from parallelformers_ng.live_code.packing import by_value as pickled_by_value
from parallelformers_ng.origins import CORE, is_library
from parallelformers_ng.wire.by_value import ReferencePickler, ReferenceUnpickler
from parallelformers_ng.wire.frame import Handle
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

Kind = Literal["_forward_hooks", "_forward_pre_hooks"]
HookChanges = tuple[Changes | None, dict[tuple[str, str], Any], list[int]]
"""Changes of the hooks' mutable objects; attributes of modules: (path, name) → value; and the
payloads of the `HookHandle`s of removed hooks."""


@dataclass(frozen=True)
class HookHandle(Handle):
    """Represents, on a worker, the caller's `RemovableHandle` of a hook.

    Attributes:
        remove: function that removes the hook on this worker, and records the payload for the caller.
    """

    remove: Callable[[], None] = lambda: None

    def __reduce__(self) -> Any:
        return Handle, (self.kind, self.payload)  # `remove` exists only on this worker


@dataclass
class Hook:
    """One forward hook.

    Attributes:
        path: path of the module with the hook.
        kind: name of the module's table of hooks.
        number: key of the hook in the table.
        call: function or object to call.
        with_kwargs: whether the hook gets the keyword arguments of the call.
        always: whether torch calls the hook even if the forward raises an error.
    """

    path: str
    kind: Kind
    number: int
    call: Any
    with_kwargs: bool = False
    always: bool = False


@dataclass
class PackedHooks:
    """Message to the workers with the hooks of a call: a pickle, and the tensors to which it refers by index."""

    data: bytes
    tensors: list[torch.Tensor]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields. Messages sign objects that have this method, and `data` needs a signature: it is code."""
        vars(self).update(state)


def is_of_library(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    place = getattr(hook, "__module__", None) or type(hook).__module__
    return str(place).partition(".")[0] in CORE


def pack(model: nn.Module, hooks: Sequence[Hook], local: list[Any], followed: Given | None = None) -> PackedHooks:
    """Pickle a model's hooks for the workers. An object that must stay in this process, such as the handle of a KV
    cache, is appended to `local` and pickled as its index in `local`. Without `followed`, only test the pickling."""
    tensors = list[torch.Tensor]()
    try:
        data = _pickled(model, hooks, tensors, local, followed)
    except ParallelError:
        raise
    except Exception as error:  # a `__reduce__` of the user may raise any error
        raise_if_of_handler(error)
        culprit = next((hook for hook in hooks if not _is_portable(model, hook)), hooks[0])
        raise ParallelError(
            f"the forward hook {described(culprit.call)} of {culprit.path or 'the model'} cannot be sent to the"
            f" workers: {error}. Remove objects that cannot be copied (a lock, an open file) from the hook, or call"
            " deparallelize() first"
        ) from error
    return PackedHooks(data, tensors)


def unpack(packed: PackedHooks, model: nn.Module, remove: Callable[[int, int], None]) -> tuple[list[Hook], Given]:
    """Unpickle a call's hooks on a worker, and the message about their mutable objects. `remove` gets the number of a
    hook and the payload of its `HookHandle`."""
    find: dict[str, Callable[[Any], Any]] = {
        "module": model.get_submodule,
        "tensor": packed.tensors.__getitem__,
        "placeholder": functools.partial(Handle, "placeholder"),
        "hook": lambda of_hook: HookHandle("placeholder", of_hook[1], functools.partial(remove, *of_hook)),
    }
    return ReferenceUnpickler(packed.data, lambda reference: find[reference[0]](reference[1])).load()


def described(hook: Any) -> str:
    """Return the name of a hook for error messages: the qualified name of a function, or of an object's class."""
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


def _is_portable(model: nn.Module, hook: Hook) -> bool:
    try:
        _pickled(model, [hook], [], [])
    except Exception as error:  # this function finds the hook that cannot be pickled, whatever the error is
        raise_if_of_handler(error)
        return False
    return True


def _pickled(
    model: nn.Module, hooks: Sequence[Hook], tensors: list[torch.Tensor], local: list[Any], followed: Any = None
) -> bytes:
    modules = {id(module): path for path, module in model.named_modules()}
    weights = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    numbers = {hook.number for hook in hooks}

    def reference(obj: Any) -> Any:
        if isinstance(obj, nn.Module) and id(obj) in modules:
            return "module", modules[id(obj)]
        if isinstance(obj, torch.Tensor):
            if id(obj) in weights or obj.device.type == "meta":
                name = weights.get(id(obj), "a weight")
                raise ParallelError(
                    f"a hook refers to {name}, and each worker has only a shard of this weight. Use the module in the"
                    " hook, or a copy of the values from before parallelize()"
                )
            if type(obj) is torch.Tensor:
                return "tensor", _place(tensors, obj)
        if isinstance(obj, CacheHandle):
            return "placeholder", _place(local, obj)
        if isinstance(obj, RemovableHandle) and obj.id in numbers:
            return "hook", (obj.id, _place(local, obj))
        return None

    buffer = io.BytesIO()
    homes = {str(getattr(code_of(hook.call), "__module__", "")) for hook in hooks}
    # Pickle these modules by value, because a copy that a worker imports would have new global variables.
    with pickled_by_value(name for name in homes if not is_library(name)):
        ReferencePickler(buffer, reference).dump(([*hooks], followed))
    return buffer.getvalue()


def _place(items: list[Any], obj: Any) -> int:
    if not any(item is obj for item in items):
        items.append(obj)
    return next(place for place, item in enumerate(items) if item is obj)
