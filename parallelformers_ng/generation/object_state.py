"""Copies changes of objects between the caller and the workers: a processor that counts, a stop flag, a list of a hook.

The workers get copies of the caller's objects, and change the copies. Caller and workers visit the objects in the same
order, so each mutable object ("part") has the same number in every process. A process sends the changes of its parts,
and the other process writes these changes to its own parts, in place. What other threads of the program change during a
call goes to the ranks in the same way.
"""

from __future__ import annotations

import functools
import io
import os
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from cloudpickle.cloudpickle import _should_pickle_by_reference
from torch import nn
from transformers.cache_utils import Cache

from parallelformers_ng.errors import NotPortableError, ParallelError
from parallelformers_ng.generation import object_parts
from parallelformers_ng.generation.object_messages import Changes, Given
from parallelformers_ng.generation.object_parts import REMOVED, Names, Place, attributes_of, items_of
from parallelformers_ng.live_code.functions import globals_in, names_in
from parallelformers_ng.live_code.object_graph import CODE, PLAIN_TYPES, is_same, values_in, walk
from parallelformers_ng.origins import is_library
from parallelformers_ng.wire.by_value import ReferencePickler, ReferenceUnpickler
from parallelformers_ng.wire.frame import Handle
from parallelformers_ng.wire.message import TENSOR_CLASSES
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

_ALL = object()
_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv"})
"""Names in code that reads or changes the environment variables."""


class ObjectState:
    """Mutable objects that are reachable from a call's arguments or hooks, with their contents at the last `remember`.

    Args:
        stand_in: function that replaces a cache or module in a message; None for objects without caches and modules.

    Attributes:
        parts: mutable objects, in the order of their numbers.
    """

    def __init__(self, roots: Iterable[Any], stand_in: Callable[[Any], Any] | None = None) -> None:
        self.parts: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._stand_in = stand_in
        self._names: dict[int, Names] = {}
        self._before: list[list[Any]] = []
        self._digests: dict[int, bytes] = {}
        self._unconfirmed: dict[int, tuple[Any, Any]] = {}  # part's number → changes that the ranks have not confirmed
        for _ in walk(roots, self._visit):
            pass

    def _visit(self, obj: Any) -> Iterator[Any]:
        """Give an object a number if it is mutable, and yield the values that it contains."""
        if object_parts.is_part(obj, with_modules=self._stand_in is None):
            self._add(obj)
            yield from object_parts.inner(obj)
            values = attributes_of(obj)
            yield from (values[name] for name in sorted(values))
            if isinstance(obj, types.FunctionType):
                yield from self._variables(obj)
            else:
                yield from obj.__mro__ if isinstance(obj, type) else type(obj).__mro__
        elif isinstance(obj, types.BuiltinMethodType) or not isinstance(obj, CODE):
            object_parts.check_can_be_followed(obj, by_hook=self._stand_in is not None)
            yield from object_parts.inner(obj)

    def _variables(self, function: types.FunctionType) -> Iterator[Any]:
        """Track the global variables that a function uses, also those of imported modules, and yield their values."""
        names, attributes = globals_in(function.__code__), names_in(function.__code__)
        if not _ENVIRONMENT.isdisjoint(attributes):
            yield os.environ._data  # type: ignore[attr-defined]
        spaces: list[tuple[Any, dict[str, Any], frozenset[str]]] = [(function, function.__globals__, names)]
        for name in sorted(names):
            module = function.__globals__.get(name)
            if isinstance(module, types.ModuleType) and not is_library(module.__name__):
                spaces.append((module, vars(module), attributes))
        for anchor, space, read in spaces:
            if id(space) not in self._names:
                self._names[id(space)] = Names(anchor)
                self._add(self._names[id(space)])
            self._names[id(space)].names |= read
            yield from (space[name] for name in sorted(read & space.keys()) if not isinstance(space[name], nn.Module))

    def _add(self, obj: Any) -> None:
        self._numbers[id(obj)] = len(self.parts)
        self.parts.append(obj)

    def followed(self, live: bool = False) -> Given:
        """Return the message with which ranks find their copies of these objects. `live`: `update` will be called."""
        places = []
        for part in self.parts:
            if isinstance(part, Place):
                cells = getattr(part, "__closure__", None) or ()
                closed = {index: items_of(cell)[0] for index, cell in enumerate(cells) if items_of(cell)}
                places.append((part, self._values(attributes_of(part)), self._values(closed)))
        if live:
            self.remember()
        codes = [part for part in self.parts if isinstance(part, (type, types.FunctionType))]
        imported = [part for part in codes if _should_pickle_by_reference(part)]
        return Given(imported, self._shape(), live, places)

    @classmethod
    def on_rank(
        cls, followed: Given, roots: Iterable[Any], stand_in: Callable[[Any], Any] | None = None
    ) -> ObjectState:
        """Create a call's state on a rank. Raise NotPortableError if its copies have other mutable objects."""
        for place, attributes, closed in followed.places:
            for name, value in attributes.items():
                object_parts.put_attribute(place, name, value)
            for index, value in closed.items():
                place.__closure__[index].cell_contents = value  # type: ignore[union-attr, index]
        state = cls(roots, stand_in)
        if state._shape() != followed.shape:
            raise NotPortableError(
                "an object given to the call has other parts after pickling (see its __getstate__ or __reduce__), so"
                " its changes cannot be copied back"
            )
        for part in state.parts:
            if isinstance(part, torch.Tensor):
                object_parts.make_resizable(part)
        state.remember()
        return state

    def _shape(self) -> int:
        return zlib.crc32(" ".join(type(part).__name__ for part in self.parts).encode())

    def _values(self, named: dict[Any, Any]) -> dict[Any, Any]:
        """Select the values that can be sent to the ranks: numbers, strings, tuples and tracked objects, but no
        code."""
        return {
            name: value
            for name, value in named.items()
            if type(value) in PLAIN_TYPES
            or isinstance(value, (tuple, frozenset))
            or (id(value) in self._numbers and not isinstance(value, CODE))
        }

    @property
    def has_own_code(self) -> bool:
        """Whether the objects include the user's classes or functions, which other threads may use to change them."""
        return any(isinstance(part, Place) for part in self.parts)

    def shares(self, other: ObjectState) -> bool:
        """Whether this state and another state contain the same mutable object, apart from code."""
        return any(id(part) in other._numbers for part in self.parts if not isinstance(part, Place))

    def remember(self, present: list[list[Any]] | None = None) -> None:
        self._before = [[attributes_of(part), items_of(part)] for part in self.parts] if present is None else present
        self._digests = {}
        for contents in self._before:
            for content in contents:
                self._note(values_in(content))

    def _note(self, values: Iterable[Any]) -> None:
        """Store digests of values that may change in place but that this object does not track."""
        for value in values:
            if type(value) not in PLAIN_TYPES and self._is_opaque(value):
                self._digests[id(value)] = self._digest(value)

    def _is_opaque(self, value: Any) -> bool:
        if type(value) in PLAIN_TYPES or id(value) in self._numbers or isinstance(value, (*CODE, Cache)):
            return False
        if isinstance(value, tuple):
            return any(map(self._is_opaque, value))
        return not (type(value).__module__ or "").startswith(("transformers.", "tokenizers", "logging"))

    def _digest(self, value: Any) -> bytes:
        try:
            return self._pickled(value, None)
        except Exception as error:  # a `__reduce__` of the user may raise anything; compare only identities then
            raise_if_of_handler(error)
            return b""

    def _differs(self, now: Any, before: Any) -> bool:
        if now is before:
            digest = self._digests.get(id(now))
            return digest is not None and digest != self._digest(now)
        if type(now) is type(before) is tuple and len(now) == len(before):
            return any(map(self._differs, now, before))
        if isinstance(now, set) and isinstance(before, set):
            return now != before
        return not is_same(now, before)

    def changes(self, again: bool = False) -> Changes | None:
        """Return the changes since `remember`, or None.

        Args:
            again: whether to call `remember`, so that the next call returns only later changes.

        Raises:
            ParallelError: a new value cannot be copied to the other process.
        """
        present = [[attributes_of(part), items_of(part)] for part in self.parts]
        changed_parts: dict[int, tuple[Any, Any]] = {}
        for number, (now, before) in enumerate(zip(present, self._before, strict=True)):
            named, new = self._changed(now[0], before[0]), self._new_items(number, now[1], before[1])
            if named is not None or new is not None:
                changed_parts[number] = named, new
        if not changed_parts:
            return None
        if again:
            self.remember(present)
            self._unconfirmed = changed_parts
        tensors = list[torch.Tensor]()
        try:
            return Changes(self._pickled(changed_parts, tensors), tensors)
        except Exception as error:  # a `__reduce__` of the user may raise anything
            raise_if_of_handler(error)
            names = ", ".join(sorted({type(self.parts[number]).__qualname__ for number in changed_parts}))
            raise ParallelError(
                f"what this call changed in its arguments ({names}) cannot be copied between the workers and this"
                f" process: {error}. Store only values there that can be pickled"
            ) from error

    def _new_items(self, number: int, now: Any, before: Any) -> Any:
        if isinstance(now, dict):
            return self._changed(now, before)
        return object_parts.state_of(self.parts[number]) if self._differs(now, before) else None

    def _changed(self, now: dict[Any, Any], before: dict[Any, Any]) -> Any:
        # The result is None, or (changed items, removed keys, and all keys if their order has changed).
        changed = {
            key: value
            for key, value in now.items()
            if (key not in before or self._differs(value, before[key]))
            and (self._stand_in is not None or not isinstance(value, (nn.Module, types.ModuleType)))
        }
        removed = [key for key in before if key not in now]
        keys = [*(key for key in before if key in now), *(key for key in now if key not in before)]
        order = [*now] if keys != [*now] else None
        return (changed, removed, order) if changed or removed or order else None

    def update(self) -> Changes | None:
        """Return what other threads changed during the call, or None while the ranks have not confirmed an update."""
        try:
            return None if self._unconfirmed else self.changes(again=True)
        except RuntimeError:  # another thread changed a dictionary or list during the comparison; compare again later
            return None

    def confirm(self) -> None:
        self._unconfirmed = {}

    def restore(self, changes: Changes | None, back: Callable[[Any], Any] | None = None, wins: bool = False) -> None:
        """Apply the changes that the other process sent to the objects of this process, in place.

        Values that this process itself has changed since `remember` stay, unless `wins` is true.

        Args:
            back: inverse of the other process's `stand_in`: returns the cache or module for a `Handle`.
        """
        if changes is None:
            return

        def resolve(reference: tuple[str, Any]) -> Any:
            kind, value = reference
            if kind == "part":
                return self.parts[value]
            handle = kind == "handle" and Handle(*value)
            return changes.tensors[value] if not handle else handle if back is None else back(handle)

        for number, (named, new) in ReferenceUnpickler(changes.data, resolve).load().items():
            part = self.parts[number]
            if named is not None:
                self._write(number, 0, named, functools.partial(object_parts.put_attribute, part), wins)
            if isinstance(part, dict) and new is not None:
                self._write(number, 1, new, functools.partial(object_parts.put_item, part), wins)
                if new[2] is not None and {*new[2]} == {*part}:
                    items = [(key, part[key]) for key in new[2]]
                    part.clear()
                    for item in items:
                        object_parts.put_item(part, *item)
            elif new is not None:
                old = self._before[number] if self._before else None
                if wins or old is None or not self._is_own(number, 1, _ALL, items_of(part), old[1]):
                    object_parts.put_items(part, new)
                    if old is not None:
                        old[1] = items_of(part)
                        self._note(values_in(old[1]))

    def _write(self, number: int, kind: int, change: Any, put: Callable[[Any, Any], None], wins: bool) -> None:
        """Apply changes of attributes (`kind` 0) or dict items (`kind` 1) to part `number`; `put` sets one value."""
        old = self._before[number][kind] if self._before else None
        now = {} if wins or old is None else (attributes_of, items_of)[kind](self.parts[number])
        changed, removed, _ = change
        for key, value in (*dict.fromkeys(removed, REMOVED).items(), *changed.items()):
            if old is not None:
                if not wins and self._is_own(number, kind, key, now.get(key, REMOVED), old.get(key, REMOVED)):
                    continue
                old.pop(key, None)
                if value is not REMOVED:
                    old[key] = value
                    self._note([value])
            put(key, value)

    def _is_own(self, number: int, kind: int, key: Any, now: Any, before: Any) -> bool:
        """Whether this process changed a value after the state from which the other process computed its changes."""
        update = self._unconfirmed.get(number, (None, None))[kind]
        is_sent = update is not None and (key is _ALL or key in update[0] or key in update[1])
        return is_sent or self._differs(now, before)

    def _pickled(self, value: Any, tensors: list[torch.Tensor] | None) -> bytes:
        def reference(obj: Any) -> Any:
            if (number := self._numbers.get(id(obj))) is not None:
                return "part", number
            if type(obj) in TENSOR_CLASSES:
                if tensors is None:  # for a digest: torch pickles an unchanged tensor differently each time
                    return "tensor", object_parts.items_of(obj)
                tensors.append(obj)
                return "tensor", len(tensors) - 1
            if self._stand_in is not None and isinstance(obj, (Cache, nn.Module)):
                obj = self._stand_in(obj)
            return ("handle", (obj.kind, obj.payload)) if isinstance(obj, Handle) else None

        buffer = io.BytesIO()
        ReferencePickler(buffer, reference).dump(value)
        return buffer.getvalue()
