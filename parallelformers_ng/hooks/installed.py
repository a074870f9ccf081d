"""Installs the caller's forward hooks on the modules of a rank, and collects the changes of the hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from parallelformers_ng.generation.caches import mapped
from parallelformers_ng.generation.object_state import ObjectState
from parallelformers_ng.hooks.pickling import Hook, HookChanges, PackedHooks, unpack
from parallelformers_ng.sharding.own_heads import OwnHeads, gathered
from parallelformers_ng.wire.frame import Handle

_ABSENT = object()
Place = tuple[str, str, int]
"""Path of a module, name of its table of hooks, and number of the hook in the table."""


class InstalledHooks:
    """Keeps the caller's forward hooks registered on the modules of one rank, in the caller's order.

    Attributes:
        present: whether any hooks are registered now.
    """

    def __init__(self, model: nn.Module, hand_out: Callable[[Cache], Handle]) -> None:
        self.present = False
        self._model = model
        self._hand_out = hand_out
        self._hooks: dict[Place, Hook] = {}
        self._handles: dict[Place, RemovableHandle] = {}
        self._state: ObjectState | None = None
        self._number = 0
        self._attributes: dict[tuple[str, str], Any] = {}
        self._removed: list[int] = []

    def install(self, packed: PackedHooks | None, number: int) -> None:
        """Register the hooks of a call, and remove hooks of earlier calls that this call does not have."""
        hooks, followed = ([], None) if packed is None else unpack(packed, self._model, self._remove)
        self._hooks = {(hook.path, hook.kind, hook.number): hook for hook in hooks}
        for place in self._handles.keys() - self._hooks.keys():
            self._handles.pop(place).remove()
        known, places = set(self._handles), [*self._hooks]
        prepended = [
            place
            for index, place in enumerate(places)
            if place not in known and any(later[:2] == place[:2] and later in known for later in places[index + 1 :])
        ]
        for place in (*reversed(prepended), *places):
            if place not in self._handles:
                self._handles[place] = self._registered(place, place in prepended)
        self.present = bool(hooks)
        if packed is None:
            return  # keeps `_state`: the caller may still request the changes of a failed call
        self._attributes, self._removed = {}, []
        calls = [hook.call for hook in hooks]
        self._state = None if followed is None else ObjectState.on_rank(followed, calls, self._stand_in)
        self._number = number

    def changes(self, number: int) -> HookChanges | None:
        """Return what the hooks changed in call `number`, even if it failed. Return it once; None also without
        hooks."""
        if self._state is None or number != self._number:
            return None
        kinds = (Cache, nn.Module)
        attributes = {
            place: mapped(value, kinds, self._stand_in, in_place=False) for place, value in self._attributes.items()
        }
        changes = self._state.changes(), attributes, self._removed
        self._state, self._attributes, self._removed = None, {}, []  # they may refer to large tensors, which this frees
        return changes

    def _remove(self, number: int, payload: int) -> None:
        """Remove a hook from this rank because a hook called `remove()` of its handle, and record it for the caller."""
        self._removed.append(payload)
        for place in [place for place in self._handles if place[2] == number]:
            self._handles.pop(place).remove()

    def _registered(self, place: Place, first: bool) -> RemovableHandle:
        """Register a function that calls the current call's hook for `place`; before the other hooks if `first`.

        The function gives the hook the attention weights of all heads, and records attributes that the hook sets on the
        module.
        """
        hook = self._hooks[place]

        def call(module: nn.Module, *arguments: Any) -> Any:
            hook = self._hooks[place]
            before = dict(vars(module))
            try:
                return hook.call(module, *(mapped(part, OwnHeads, gathered, in_place=True) for part in arguments))
            finally:
                for name, value in vars(module).items():
                    if before.get(name, _ABSENT) is not value:
                        self._attributes[hook.path, name] = value

        module = self._model.get_submodule(hook.path)
        if hook.kind == "_forward_pre_hooks":
            return module.register_forward_pre_hook(call, prepend=first, with_kwargs=hook.with_kwargs)
        return module.register_forward_hook(call, prepend=first, with_kwargs=hook.with_kwargs, always_call=hook.always)

    def _stand_in(self, part: Any) -> Any:
        if isinstance(part, Cache):
            return self._hand_out(part)
        path = next((path for path, module in self._model.named_modules() if module is part), None)
        return part if path is None else Handle("module", path)
