"""The caller's forward hooks on the modules of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.generation.caches import mapped
from parallelformers_ng.generation.state import Watch
from parallelformers_ng.hooks.crossing import Hook, Kept, Noted, Sent, unpack
from parallelformers_ng.sharding.own_heads import OwnHeads, gathered
from parallelformers_ng.wire.format import Handle

_ABSENT = object()
Place = tuple[str, str, int]


class Mounted:
    """Hooks that stay on the modules from call to call, each in its place, while what they are comes anew.

    Args:
        model: the rank's model.
        device: where its tensors are.
        hand_out: what the caller gets for a cache.
    """

    def __init__(self, model: nn.Module, device: torch.device, hand_out: Callable[[Cache], Handle]) -> None:
        self._model = model
        self._device = device
        self._hand_out = hand_out
        self._mounted: dict[Place, Hook] = {}
        self._watch: Watch | None = None
        self._number = 0
        self._attributes: dict[tuple[str, str], Any] = {}

    def __bool__(self) -> bool:
        return bool(self._mounted)

    def mount(self, sent: Sent | None, number: int) -> None:
        """Have the modules call these hooks, and no others of the caller's, in the call of that number."""
        hooks = [] if sent is None else unpack(sent, self._model, self._device)
        wanted = {(hook.path, hook.kind, hook.number): hook for hook in hooks}
        for place in [place for place in self._mounted if place not in wanted]:
            self._unmount(place)
        known = set(self._mounted)
        for index, (place, hook) in enumerate(wanted.items()):
            later = list(wanted)[index + 1 :]
            first = place not in known and any(other[:2] == place[:2] and other in known for other in later)
            self._put(place, hook, first)
        self._attributes = {}
        self._watch = Watch([hook.call for hook in hooks], self._there, with_globals=True) if hooks else None
        if sent is not None and self._watch is not None:
            if len(self._watch.parts) != sent.parts:
                raise ParallelError(
                    f"the forward hooks hold {sent.parts} objects that change, and their copies on the workers"
                    f" {len(self._watch.parts)}, so that what they note cannot be brought home. Have them hold plain"
                    " lists, dicts and objects, or call deparallelize() first"
                )
            self._watch.remember()
        self._number = number

    def noted(self, number: int) -> Noted | None:
        """What the hooks noted in the call of that number; None where they were not mounted for it."""
        if self._watch is None or number != self._number:
            return None
        return self._watch.changes(), {place: self._there(value) for place, value in self._attributes.items()}

    def _put(self, place: Place, hook: Hook, first: bool) -> None:
        module, key = self._model.get_submodule(hook.path), ("caller's", hook.number)
        table = getattr(module, hook.kind)
        table[key] = _Called(hook, self._attributes_of(hook.path))
        if first:
            table.move_to_end(key, last=False)
        if hook.with_kwargs:
            getattr(module, f"{hook.kind}_with_kwargs")[key] = True
        if hook.always:
            module._forward_hooks_always_called[key] = True  # type: ignore[index]
        self._mounted[place] = hook

    def _unmount(self, place: Place) -> None:
        hook = self._mounted.pop(place)
        module, key = self._model.get_submodule(hook.path), ("caller's", hook.number)
        tables = (hook.kind, f"{hook.kind}_with_kwargs", "_forward_hooks_always_called")
        for table in tables:
            getattr(module, table).pop(key, None)

    def _attributes_of(self, path: str) -> Callable[[str, Any], None]:
        def note(name: str, value: Any) -> None:
            self._attributes[path, name] = value

        return note

    def _there(self, value: Any) -> Any:
        """A value as it goes home."""
        return mapped(value, (Cache, nn.Module, Kept), self._stand_in, in_place=False)

    def _stand_in(self, part: Any) -> Any:
        if isinstance(part, Cache):
            return self._hand_out(part)
        if isinstance(part, Kept):
            return Handle("kept here", part.number)
        path = next((path for path, module in self._model.named_modules() if module is part), None)
        return part if path is None else Handle("module", path)


class _Called:
    """A hook as a module calls it: it sees the weights of all heads, and what it sets on its module is noted."""

    def __init__(self, hook: Hook, note: Callable[[str, Any], None]) -> None:
        self._call = hook.call
        self._note = note

    def __call__(self, module: nn.Module, *seen: Any) -> Any:
        before = dict(vars(module))
        try:
            return self._call(module, *(mapped(part, OwnHeads, gathered, in_place=True) for part in seen))
        finally:
            for name, value in vars(module).items():
                if before.get(name, _ABSENT) is not value:
                    self._note(name, value)
