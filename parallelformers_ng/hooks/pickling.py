"""Hooks on their way to the workers: by value, in one piece, so that what they share stays shared.

Modules of the model are named, not copied: on a worker they are that worker's. Objects that only exist in the caller's
process, such as a handle of a cache, stay behind, and a `Placeholder` goes in their place.
"""

from __future__ import annotations

import functools
import io
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import cloudpickle
import torch
from cloudpickle import cloudpickle as by_value
from torch import nn

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.generation.cache_handle import CacheHandle
from parallelformers_ng.generation.object_state import code_of
from parallelformers_ng.wire.by_value import ReferencePickler, ReferenceUnpickler

Kind = Literal["_forward_hooks", "_forward_pre_hooks"]
LIBRARIES = ("torch.", "transformers.")
HookChanges = tuple[dict[int, Any], dict[tuple[str, str], Any]]
"""States of what the hooks hold, by the numbers of `ObjectState`, and attributes of modules: (path, name) → value."""


@dataclass
class Hook:
    """One forward hook.

    Attributes:
        path: path of the module with the hook.
        kind: the module's table that holds it.
        number: its place in that table.
        call: function or object to call.
        with_kwargs, always: options of the registration.
    """

    path: str
    kind: Kind
    number: int
    call: Any
    with_kwargs: bool = False
    always: bool = False


@dataclass
class PackedHooks:
    """Hooks as they travel.

    Attributes:
        data: a pickle.
        tensors: tensors that the pickle names by number.
        parts: how many mutable parts `ObjectState` finds in them, there as here.
    """

    data: bytes
    tensors: list[torch.Tensor]
    parts: int = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """With this it travels as a pickle, which is signed, and not field by field: `data` is code."""
        vars(self).update(state)


@dataclass(frozen=True)
class Placeholder:
    """Stands on a worker for an object that stays with the caller."""

    number: int


def is_of_library(hook: Any) -> bool:
    """Return whether a hook is part of how a model computes: torch's and transformers' own."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    place = getattr(hook, "__module__", None) or type(hook).__module__
    return str(place).startswith(LIBRARIES)


def pack(model: nn.Module, hooks: Sequence[Hook], local: list[Any]) -> PackedHooks:
    """Take hooks of `model` to the wire; what stays behind is added to `local`.

    Raises:
        ParallelError: one cannot cross, in words.
    """
    buffer, tensors = io.BytesIO(), list[torch.Tensor]()
    try:
        with _by_value(hooks):
            _HookPickler(buffer, model, tensors, local).dump(list(hooks))
    except ParallelError:
        raise
    except Exception as error:  # reducers are foreign code and raise anything
        culprit = next((hook for hook in hooks if not _is_portable(model, hook)), hooks[0])
        raise ParallelError(
            f"the forward hook {described(culprit.call)} of {culprit.path or 'the model'} cannot be sent to the"
            f" workers: {error}. Have it hold nothing that cannot be copied (a lock, an open file), or call"
            " deparallelize() first"
        ) from error
    return PackedHooks(buffer.getvalue(), tensors)


def unpack(packed: PackedHooks, model: nn.Module) -> list[Hook]:
    """Return the hooks on a worker, where their tensors have arrived."""
    find: dict[str, Callable[[Any], Any]] = {
        "module": model.get_submodule, "tensor": packed.tensors.__getitem__, "placeholder": Placeholder
    }  # fmt: skip
    return ReferenceUnpickler(packed.data, lambda reference: find[reference[0]](reference[1])).load()


def described(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


def _is_portable(model: nn.Module, hook: Hook) -> bool:
    try:
        with _by_value([hook]):
            _HookPickler(io.BytesIO(), model, [], []).dump(hook)
    except Exception:  # the very failure that is being located
        return False
    return True


@contextmanager
def _by_value(hooks: Sequence[Hook]) -> Iterator[None]:
    """Within it, the modules that define hooks go by value: imported anew, their global variables would be others."""
    names = {str(getattr(code_of(hook.call), "__module__", "")) for hook in hooks}
    modules = [sys.modules[name] for name in names if name in sys.modules and not name.startswith(LIBRARIES)]
    with _registering:
        added = [module for module in modules if module.__name__ not in by_value.list_registry_pickle_by_value()]
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in added:
                cloudpickle.unregister_pickle_by_value(module)


_registering = threading.RLock()
"""Held while modules go by value: cloudpickle has one list of them for all threads."""


class _HookPickler(ReferencePickler):
    def __init__(self, buffer: io.BytesIO, model: nn.Module, tensors: list[torch.Tensor], local: list[Any]) -> None:
        super().__init__(buffer, self._reference)
        self._modules = {id(module): path for path, module in model.named_modules()}
        self._weights = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._tensors = tensors
        self._local = local
        self._cells: dict[int, types.CellType] = {}

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if not isinstance(obj, types.FunctionType) or not obj.__closure__ or not isinstance(reduced, tuple):
            return reduced
        # By itself cloudpickle gives each function cells of its own; a variable that two share would become two.
        make, (*code, empty), *rest = reduced
        assert len(empty) == len(obj.__closure__)
        cells = tuple(self._cells.setdefault(id(cell), new) for cell, new in zip(obj.__closure__, empty, strict=True))
        return make, (*code, cells), *rest

    def _reference(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and id(obj) in self._modules:
            return "module", self._modules[id(obj)]
        if isinstance(obj, torch.Tensor):
            if id(obj) in self._weights or obj.device.type == "meta":
                name = self._weights.get(id(obj), "a weight")
                raise ParallelError(
                    f"a hook holds {name}, of which the workers have their parts. Have it hold the module, or a copy of"
                    " the values made before parallelize"
                )
            if type(obj) is torch.Tensor:
                return "tensor", _place(self._tensors, obj)
        if isinstance(obj, CacheHandle):
            return "placeholder", _place(self._local, obj)
        return None


def _place(items: list[Any], obj: Any) -> int:
    if not any(item is obj for item in items):
        items.append(obj)
    return next(place for place, item in enumerate(items) if item is obj)
