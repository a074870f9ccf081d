"""Brings the state of a caller's objects home: a logits processor that counts, a list that a hook appends to.

The objects cross to the workers by value, so what they change there is a copy. Caller and worker walk them in the same
order, which gives every mutable part the same number on both sides; parts that changed come back and are written in
place.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

from parallelformers_ng.wire.frame import Handle

STATEFUL = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
"""Arguments of `generate` that take objects with code of the caller's."""

LIBRARIES = ("parallelformers_ng.", "transformers.", "torch.", "tokenizers.", "numpy.", "builtins", "collections")


class ObjectState:
    """The mutable parts of some objects.

    Args:
        roots: the objects.
        stand_in: function that returns the stand-in for a value in the message; by default the value itself.
        with_globals: their functions were sent by value, so that global variables, defaults and attributes of these are
            parts as well.
    """

    def __init__(
        self, roots: Iterable[Any], stand_in: Callable[[Any], Any] | None = None, with_globals: bool = False
    ) -> None:
        self.parts: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._functions: set[int] = set()
        self._out = stand_in
        roots = list(roots)
        self._modules = {getattr(code_of(root), "__module__", "") for root in roots} if with_globals else set()
        for root in roots:
            self._walk(root)
        self._before: list[bytes] = []

    def remember(self) -> None:
        """Note the present state, to tell later what changed."""
        self._before = [cloudpickle.dumps(self._state(part)) for part in self.parts]

    def changes(self) -> dict[int, Any]:
        """State of every part that changed since `remember`, by number."""
        states = {number: self._state(part) for number, part in enumerate(self.parts)}
        return {number: state for number, state in states.items() if cloudpickle.dumps(state) != self._before[number]}

    def restore(self, states: dict[int, Any], back: Callable[[Any], Any] | None = None) -> None:
        """Write states that `changes` gave on the other side to the parts here, in place.

        Args:
            back: the inverse of the other side's `stand_in`.
        """

        def here(item: Any) -> Any:
            if isinstance(item, Handle) and item.kind == "part":
                return self.parts[item.payload]
            return item if back is None else back(item)

        for number, state in states.items():
            part = self.parts[number]
            if isinstance(part, (list, deque)):
                new = [part[at] if _is_local(item) and at < len(part) else here(item) for at, item in enumerate(state)]
                part.clear()
                part.extend(new)
            elif isinstance(part, dict):
                state = [(here(key), item) for key, item in state]
                local = {key: part[key] for key, item in state if _is_local(item) and key in part}
                part.clear()
                for key, item in state:  # a Counter's update() would count them
                    part[key] = local.get(key) if _is_local(item) else here(item)
            elif isinstance(part, set):
                part.clear()
                part.update(map(here, state))
            elif isinstance(part, types.CellType):
                if not _is_local(state):
                    part.cell_contents = here(state)
            else:
                attributes = part.namespace if isinstance(part, _Global) else vars(part)
                attributes.update((key, here(item)) for key, item in state if not _is_local(item))

    def shares(self, other: ObjectState) -> bool:
        """Return whether a part belongs to both."""
        return not self._numbers.keys().isdisjoint(other._numbers)

    def _walk(self, obj: Any) -> None:
        if id(obj) in self._numbers or isinstance(
            obj, (torch.Tensor, torch.nn.Module, PreTrainedModel, type, types.ModuleType)
        ):
            return
        if isinstance(obj, types.MethodType):
            self._walk(obj.__func__)
            self._walk(obj.__self__)
        elif isinstance(obj, functools.partial):
            for item in (obj.func, *obj.args, *obj.keywords.values()):
                self._walk(item)
        elif isinstance(obj, types.FunctionType):
            self._walk_function(obj)
        elif isinstance(obj, (list, dict, set, deque)):
            self._add(obj)
            for item in obj.values() if isinstance(obj, dict) else () if isinstance(obj, set) else obj:
                self._walk(item)
        elif isinstance(obj, tuple):
            for item in obj:
                self._walk(item)
        elif _has_state(obj):
            self._add(obj)
            self._walk(code_of(obj))
            for item in vars(obj).values():
                self._walk(item)

    def _walk_function(self, function: types.FunctionType) -> None:
        if id(function) in self._functions:
            return
        self._functions.add(id(function))
        for cell in self._cells(function):
            self._add(cell)
            self._walk(cell.cell_contents)
        if function.__module__ in self._modules:
            for value in (*(function.__defaults__ or ()), function.__kwdefaults__, vars(function)):
                self._walk(value)
            read, written = _global_names(function.__code__)
            for name in sorted(written):
                self._add_global(function.__globals__, name)
            for name in sorted(read & function.__globals__.keys()):
                self._walk(function.__globals__[name])

    def _add_global(self, namespace: dict[str, Any], name: str) -> None:
        known = (part for part in self.parts if isinstance(part, _Global) and part.name == name)
        if not any(part.namespace is namespace for part in known):
            self._add(_Global(namespace, name))

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
        if isinstance(part, (list, deque)):
            return [self._there(item) for item in part]
        if isinstance(part, dict):
            return [(self._there(key), self._there(item)) for key, item in part.items()]
        if isinstance(part, set):
            return set(map(self._there, part))
        if isinstance(part, types.CellType):
            return self._there(part.cell_contents)
        attributes = part.held() if isinstance(part, _Global) else vars(part)
        return [(key, self._there(item)) for key, item in attributes.items()]

    def _there(self, item: Any) -> Any:
        """Return a stand-in for what is a part itself, or stays on its side; other values as they are."""
        if id(item) in self._numbers:
            return Handle("part", self._numbers[id(item)])
        if self._out is not None:
            item = self._out(item)
        if isinstance(item, (types.FunctionType, types.MethodType, types.ModuleType, torch.nn.Module, type)):
            return Handle("local", None)
        return item


@dataclass(eq=False)
class _Global:
    """A global variable that a function writes."""

    namespace: dict[str, Any]
    name: str

    def held(self) -> dict[str, Any]:
        """Return its name and value if it has a name."""
        return {self.name: self.namespace[self.name]} if self.name in self.namespace else {}


def code_of(root: Any) -> Any:
    """Return the function that is run when a callable is called."""
    while isinstance(root, functools.partial):
        root = root.func
    if isinstance(root, types.MethodType):
        return root.__func__
    return root if isinstance(root, types.FunctionType) else getattr(type(root), "__call__", None)  # noqa: B004 (not whether, but which)


def _global_names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the names of global variables that code reads, and that it writes."""
    read, written = set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            read.add(instruction.argval)
        elif instruction.opname == "STORE_GLOBAL":
            written.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_read, inner_written = _global_names(constant)
            read |= inner_read
            written |= inner_written
    return read, written


def stateful_arguments(kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the objects with code of the caller's among the arguments of `generate`."""
    for name in STATEFUL:
        value = kwargs.get(name)
        yield from value if isinstance(value, (list, tuple)) else [value]


def _is_local(item: Any) -> bool:
    return isinstance(item, Handle) and item.kind == "local"


def _has_state(obj: Any) -> bool:
    """Objects of the caller's classes, and the library's processors and criteria; not tokenizers, configurations, …."""
    if not hasattr(obj, "__dict__"):
        return False
    if isinstance(obj, (LogitsProcessor, StoppingCriteria)):
        return True
    return not type(obj).__module__.startswith(LIBRARIES)
