"""Copies changes of objects on the workers back to the caller's objects: a processor that counts, a list of a hook.

The workers get copies of the caller's objects, and change the copies. Caller and worker visit the objects in the same
order, so each mutable part has the same number in both processes. The worker sends the states of changed parts, and the
caller writes these states to its own parts, in place.
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
"""Arguments of `generate` that accept objects with the caller's code."""

_MUTATORS = frozenset({
    "__setitem__", "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop",
    "popitem", "popleft", "remove", "setdefault", "subtract", "update",
})  # fmt: skip
_STORES = frozenset({"STORE_SUBSCR", "STORE_ATTR", "DELETE_SUBSCR", "DELETE_ATTR"})
LIBRARIES = ("parallelformers_ng.", "transformers.", "torch.", "tokenizers.", "numpy.", "builtins", "collections")


class ObjectState:
    """The mutable parts of the caller's objects, in the caller or on a worker.

    Args:
        roots: objects to visit.
        stand_in: function that returns the stand-in for a value in the message; by default the value itself.
        with_globals: whether global variables, defaults and attributes of functions are parts, too. True for functions
            that the caller sends by value.

    Attributes:
        parts: mutable parts, in the order of their numbers.
    """

    def __init__(
        self, roots: Iterable[Any], stand_in: Callable[[Any], Any] | None = None, with_globals: bool = False
    ) -> None:
        self.parts: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._functions: set[int] = set()
        self._globals: set[tuple[int, str]] = set()
        self._stand_in = stand_in
        roots = list(roots)
        self._modules = {getattr(code_of(root), "__module__", "") for root in roots} if with_globals else set()
        for root in roots:
            self._walk(root)
        self._before: list[bytes] = []

    def remember(self) -> None:
        """Store the present state of all parts for a later call of `changes`.

        Raises:
            pickle.PicklingError, TypeError: cloudpickle cannot pickle a value of a part.
        """
        self._before = [cloudpickle.dumps(self._state(part)) for part in self.parts]

    def changes(self) -> dict[int, Any]:
        """Return number → state, for the parts that changed since `remember`, which must have been called.

        Raises:
            pickle.PicklingError, TypeError: see `remember`.
        """
        states = {number: self._state(part) for number, part in enumerate(self.parts)}
        return {number: state for number, state in states.items() if cloudpickle.dumps(state) != self._before[number]}

    def restore(self, states: dict[int, Any], back: Callable[[Any], Any] | None = None) -> None:
        """Write the result of `changes` in the other process to the parts in this process, in place.

        Args:
            states: number of a part → its state in the other process.
            back: function that returns the value for a stand-in: the inverse of the other process's `stand_in`.
        """

        def received(item: Any) -> Any:
            if isinstance(item, Handle) and item.kind == "part":
                return self.parts[item.payload]
            return item if back is None else back(item)

        for number, state in states.items():
            part = self.parts[number]
            if isinstance(part, (list, deque)):
                new = [
                    part[at] if _is_local(item) and at < len(part) else received(item) for at, item in enumerate(state)
                ]
                part.clear()
                part.extend(new)
            elif isinstance(part, dict):
                state = [(received(key), item) for key, item in state]
                local = {key: part[key] for key, item in state if _is_local(item) and key in part}
                part.clear()
                for key, item in state:  # a Counter's update() would add to the old counts
                    part[key] = local.get(key) if _is_local(item) else received(item)
            elif isinstance(part, set):
                part.clear()
                part.update(map(received, state))
            elif isinstance(part, types.CellType):
                if not _is_local(state):
                    part.cell_contents = received(state)
            else:
                attributes = part.namespace if isinstance(part, _Global) else vars(part)
                attributes.update((key, received(item)) for key, item in state if not _is_local(item))

    def shares(self, other: ObjectState) -> bool:
        """Return whether any part belongs to this state and to the other state."""
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
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # the cell is empty
                continue
            if id(cell) not in self._numbers:
                self._add(cell)
                self._walk(value)
        if function.__module__ in self._modules:
            for value in (*(function.__defaults__ or ()), function.__kwdefaults__, vars(function)):
                self._walk(value)
            read, assigned, _ = global_names(function.__code__)
            for name in sorted(assigned):
                key = id(function.__globals__), name
                if key not in self._globals:
                    self._globals.add(key)
                    self._add(_Global(function.__globals__, name))
            for name in sorted(read & function.__globals__.keys()):
                self._walk(function.__globals__[name])

    def _add(self, obj: Any) -> None:
        self._numbers[id(obj)] = len(self.parts)
        self.parts.append(obj)

    def _state(self, part: Any) -> Any:
        if isinstance(part, (list, deque)):
            return [self._to_message(item) for item in part]
        if isinstance(part, dict):
            return [(self._to_message(key), self._to_message(item)) for key, item in part.items()]
        if isinstance(part, set):
            return set(map(self._to_message, part))
        if isinstance(part, types.CellType):
            return self._to_message(part.cell_contents)
        attributes = part.value_by_name() if isinstance(part, _Global) else vars(part)
        return [(key, self._to_message(item)) for key, item in attributes.items()]

    def _to_message(self, item: Any) -> Any:
        """Return the form of a value in a message.

        A handle replaces a part, and a value that cannot leave its process (a function, a module, a class).
        """
        if id(item) in self._numbers:
            return Handle("part", self._numbers[id(item)])
        if self._stand_in is not None:
            item = self._stand_in(item)
        if isinstance(item, (types.FunctionType, types.MethodType, types.ModuleType, torch.nn.Module, type)):
            return Handle("local", None)
        return item


@dataclass(eq=False)
class _Global:
    """A global variable that one of the functions assigns."""

    namespace: dict[str, Any]
    name: str

    def value_by_name(self) -> dict[str, Any]:
        """Return a dictionary of the variable's name and value, empty if the variable is undefined."""
        return {self.name: self.namespace[self.name]} if self.name in self.namespace else {}


def code_of(root: Any) -> Any:
    """Return the function that runs if a callable is called.

    For a callable object, that is `__call__` of its class; for a partial object, the innermost function.
    """
    while isinstance(root, functools.partial):
        root = root.func
    if isinstance(root, types.MethodType):
        return root.__func__
    return root if isinstance(root, types.FunctionType) else getattr(type(root), "__call__", None)  # noqa: B004 (the function itself is needed)


@functools.lru_cache(256)
def global_names(code: types.CodeType) -> tuple[set[str], set[str], set[str]]:
    """Return the names of the global variables that code, and functions within the code, read, assign and change.

    `notes[…] = `, `notes.count = ` and `notes.append(…)` change the variable `notes`.
    """
    read, assigned, changed = names = set[str](), set[str](), set[str]()
    begins: dict[Any, str] = {}  # (line, column) → name of the global variable at that position
    for instruction in dis.get_instructions(code):
        place = instruction.positions and (instruction.positions.lineno, instruction.positions.col_offset)
        if instruction.opname == "STORE_GLOBAL":
            assigned.add(instruction.argval)
        elif instruction.opname == "LOAD_GLOBAL":
            read.add(instruction.argval)
            begins[place] = instruction.argval
        elif place in begins and (instruction.opname in _STORES or instruction.argval in _MUTATORS):
            changed.add(begins[place])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for known, inner in zip(names, global_names(constant), strict=True):
                known |= inner
    return names


def stateful_arguments(kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments of `generate` that contain the caller's code, one object at a time.

    An absent argument yields None; a list or tuple yields its items.
    """
    for name in STATEFUL:
        value = kwargs.get(name)
        yield from value if isinstance(value, (list, tuple)) else [value]


def _is_local(item: Any) -> bool:
    return isinstance(item, Handle) and item.kind == "local"


def _has_state(obj: Any) -> bool:
    """Return whether an object is of the caller's class, or is a processor or criterion; False for tokenizers, …."""
    if not hasattr(obj, "__dict__"):
        return False
    if isinstance(obj, (LogitsProcessor, StoppingCriteria)):
        return True
    return not type(obj).__module__.startswith(LIBRARIES)
