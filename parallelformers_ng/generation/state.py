"""Brings the state of a caller's objects home: a logits processor that counts, a list that a callback appends to.

The objects cross to the workers by value, so what they change there is a copy. Caller and worker walk them in the same
order, which gives every mutable part the same number on both sides; parts that changed come back and are written in
place.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

from parallelformers_ng.runtime.leaves import Handle

WATCHED = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
"""Arguments of `generate` that take objects with code of the caller's."""

_LIBRARIES = ("transformers.", "torch.", "tokenizers.", "numpy.", "builtins", "collections")


class Watch:
    """The mutable parts of some objects.

    Args:
        kwargs: arguments of `generate`; those named in `WATCHED` are walked.
    """

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.parts: list[Any] = []
        self._numbers: dict[int, int] = {}
        for name in WATCHED:
            value = kwargs.get(name)
            for item in value if isinstance(value, (list, tuple)) else [value]:
                self._walk(item)
        self._before: list[bytes] = []

    def remember(self) -> None:
        """Note the present state, to tell later what changed."""
        self._before = [cloudpickle.dumps(self._state(part)) for part in self.parts]

    def changes(self) -> dict[int, Any]:
        """State of every part that changed since `remember`, by number."""
        states = {number: self._state(part) for number, part in enumerate(self.parts)}
        return {number: state for number, state in states.items() if cloudpickle.dumps(state) != self._before[number]}

    def restore(self, states: dict[int, Any]) -> None:
        """Write states that `changes` gave on the other side to the parts here, in place."""
        for number, state in states.items():
            part = self.parts[number]
            if isinstance(part, list):
                part[:] = [self._here(item) for item in state]
            elif isinstance(part, dict):
                kept = {key: part[key] for key, item in state if _is_kept(item) and key in part}
                part.clear()
                part.update((key, kept.get(key) if _is_kept(item) else self._here(item)) for key, item in state)
            elif isinstance(part, set):
                part.clear()
                part.update(state)
            elif isinstance(part, types.CellType):
                if not _is_kept(state):
                    part.cell_contents = self._here(state)
            else:
                vars(part).update((key, self._here(item)) for key, item in state if not _is_kept(item))

    def _walk(self, obj: Any) -> None:
        if id(obj) in self._numbers or isinstance(
            obj, (torch.Tensor, torch.nn.Module, PreTrainedModel, type, types.ModuleType)
        ):
            return
        if isinstance(obj, types.MethodType):
            self._walk(obj.__self__)
        elif isinstance(obj, types.FunctionType):
            for cell in self._cells(obj):
                self._add(cell)
                self._walk(cell.cell_contents)
        elif isinstance(obj, (list, dict, set)):
            self._add(obj)
            for item in obj.values() if isinstance(obj, dict) else obj if isinstance(obj, list) else ():
                self._walk(item)
        elif _has_state(obj):
            self._add(obj)
            for item in vars(obj).values():
                self._walk(item)

    def _add(self, obj: Any) -> None:
        self._numbers[id(obj)] = len(self.parts)
        self.parts.append(obj)

    def _cells(self, function: types.FunctionType) -> Iterator[types.CellType]:
        for cell in function.__closure__ or ():
            try:
                cell.cell_contents  # noqa: B018 (an empty cell raises)
            except ValueError:
                continue
            if id(cell) not in self._numbers:
                yield cell

    def _state(self, part: Any) -> Any:
        if isinstance(part, list):
            return [self._there(item) for item in part]
        if isinstance(part, dict):
            return [(key, self._there(item)) for key, item in part.items()]
        if isinstance(part, set):
            return set(part)
        if isinstance(part, types.CellType):
            return self._there(part.cell_contents)
        return [(key, self._there(item)) for key, item in vars(part).items()]

    def _there(self, item: Any) -> Any:
        """A stand-in for what is a part itself, or stays on its side; other values as they are."""
        if id(item) in self._numbers:
            return Handle("part", self._numbers[id(item)])
        if isinstance(item, (types.FunctionType, types.MethodType, types.ModuleType, torch.nn.Module, type)):
            return Handle("kept", None)
        return item

    def _here(self, item: Any) -> Any:
        return self.parts[item.payload] if isinstance(item, Handle) and item.kind == "part" else item


def _is_kept(item: Any) -> bool:
    return isinstance(item, Handle) and item.kind == "kept"


def _has_state(obj: Any) -> bool:
    """Objects of the caller's classes, and the library's processors and criteria; not tokenizers, configurations, …."""
    if not hasattr(obj, "__dict__"):
        return False
    if isinstance(obj, (LogitsProcessor, StoppingCriteria)):
        return True
    return not type(obj).__module__.startswith(_LIBRARIES)
