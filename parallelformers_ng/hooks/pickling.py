"""Pickles all hooks of a call together and by value, so that objects that hooks share stay shared on the workers.

The pickle refers to modules of the model by path: a worker uses its own modules. A `Handle` replaces an object
that only exists in the caller's process, such as the handle of a cache.
"""

from __future__ import annotations

import contextlib
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
from parallelformers_ng.generation.object_state import Changes, Given
from parallelformers_ng.live_code.packing import by_value as pickled_by_value
from parallelformers_ng.wire.by_value import ReferencePickler, ReferenceUnpickler
from parallelformers_ng.wire.frame import Handle
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

Kind = Literal["_forward_hooks", "_forward_pre_hooks"]
LIBRARIES = ("torch.", "transformers.")
HookChanges = tuple[Changes | None, dict[tuple[str, str], Any], list[int]]
"""Changes of the hooks' mutable objects; attributes of modules: (path, name) → value; and the
payloads of the `HookHandle`s of removed hooks."""


@dataclass(frozen=True)
class HookHandle(Handle):
    """Stands on a worker for the caller's handle of a hook of this call.

    Attributes:
        on_remove: function that removes the hook on this worker, and notes the payload.
    """

    on_remove: Callable[[], None] = lambda: None

    def remove(self) -> None:
        self.on_remove()

    def __reduce__(self) -> Any:
        return Handle, (self.kind, self.payload)  # for the caller, and for comparisons of states


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
    """Hooks in the form of a message to the workers.

    Attributes:
        data: pickle of the hooks, and of what the ranks need to follow the objects of the hooks.
        tensors: tensors to which the pickle refers by number.
    """

    data: bytes
    tensors: list[torch.Tensor]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the fields. Because of this method, messages pickle and sign the object: `data` contains code."""
        vars(self).update(state)


def is_of_library(hook: Any) -> bool:
    """Return whether a hook belongs to torch or transformers, and not to the caller."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    place = getattr(hook, "__module__", None) or type(hook).__module__
    return str(place).startswith(LIBRARIES)


def pack(model: nn.Module, hooks: Sequence[Hook], local: list[Any], followed: Given | None = None) -> PackedHooks:
    """Pickle hooks of a model for the workers.

    Args:
        model: model with the hooks.
        hooks: hooks to pickle.
        local: list to which objects are added that stay in the caller's process; the payload of their
            handles is an index.
        followed: what the ranks need to follow the objects of the hooks; None for a trial.

    Raises:
        ParallelError: a hook cannot be sent.
    """
    buffer, tensors = io.BytesIO(), list[torch.Tensor]()
    try:
        with _by_value(hooks):
            _HookPickler(buffer, model, tensors, local, {hook.number for hook in hooks}).dump((list(hooks), followed))
    except ParallelError:
        raise
    except Exception as error:  # reducers are foreign code and may raise any error
        raise_if_of_handler(error)
        culprit = next((hook for hook in hooks if not _is_portable(model, hook)), hooks[0])
        raise ParallelError(
            f"the forward hook {described(culprit.call)} of {culprit.path or 'the model'} cannot be sent to the"
            f" workers: {error}. Remove objects that cannot be copied (a lock, an open file) from the hook, or call"
            " deparallelize() first"
        ) from error
    return PackedHooks(buffer.getvalue(), tensors)


def unpack(packed: PackedHooks, model: nn.Module, remove: Callable[[int, int], None]) -> tuple[list[Hook], Given]:
    """Return the hooks, and what is needed to follow their objects, on a worker that has received the tensors.

    Args:
        packed: result of `pack` in the caller's process.
        model: the rank's model.
        remove: function that removes a hook, given its number and the payload of its `HookHandle`.

    Raises:
        AttributeError: the rank's model has no module of a path, or a module lacks a function or class of a hook.
        ImportError: this process cannot import a module that a hook needs.
    """
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
        with _by_value([hook]):
            _HookPickler(io.BytesIO(), model, [], [], set()).dump(hook)
    except Exception as error:  # any error: this function locates the hook that fails
        raise_if_of_handler(error)
        return False
    return True


def _by_value(hooks: Sequence[Hook]) -> contextlib.AbstractContextManager[None]:
    """Within the block, pickle the modules that define hooks by value: an imported copy would have new variables."""
    names = {str(getattr(code_of(hook.call), "__module__", "")) for hook in hooks}
    return pickled_by_value(name for name in names if not name.startswith(LIBRARIES))


class _HookPickler(ReferencePickler):
    def __init__(
        self, buffer: io.BytesIO, model: nn.Module, tensors: list[torch.Tensor], local: list[Any], numbers: set[int]
    ) -> None:
        super().__init__(buffer, self._reference)
        self._numbers = numbers
        self._modules = {id(module): path for path, module in model.named_modules()}
        self._weights = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._tensors = tensors
        self._local = local

    def _reference(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and id(obj) in self._modules:
            return "module", self._modules[id(obj)]
        if isinstance(obj, torch.Tensor):
            if id(obj) in self._weights or obj.device.type == "meta":
                name = self._weights.get(id(obj), "a weight")
                raise ParallelError(
                    f"a hook refers to {name}, and each worker has only a shard of this weight. Use the module in the"
                    " hook, or a copy of the values from before parallelize()"
                )
            if type(obj) is torch.Tensor:
                return "tensor", _place(self._tensors, obj)
        if isinstance(obj, CacheHandle):
            return "placeholder", _place(self._local, obj)
        if isinstance(obj, RemovableHandle) and obj.id in self._numbers:
            return "hook", (obj.id, _place(self._local, obj))
        return None


def _place(items: list[Any], obj: Any) -> int:
    """Return the index of an object in a list; append the object if the list does not contain it."""
    if not any(item is obj for item in items):
        items.append(obj)
    return next(place for place, item in enumerate(items) if item is obj)
