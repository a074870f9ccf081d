"""Pickles changed code by value, for the ranks."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from parallelformers_ng.errors import NotPortableError
from parallelformers_ng.live_code.content import digest
from parallelformers_ng.live_code.reach import Slot, module_of
from parallelformers_ng.origins import is_library
from parallelformers_ng.wire.by_value import ByValuePickler
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

# Name by which code is looked up, as in `Slot.place` → digest of its value.
Digests = dict[str, bytes]


@dataclass(frozen=True)
class CodeChanges:
    """Changed code of the caller, and the globals that the code reads, to be applied on the ranks.

    Attributes:
        data: pickle of a mapping: name of a slot → new value.
        of_step: whether a forward pass reaches changed code of a library.
        by_value: names of modules whose code was pickled by value, because ranks cannot import that code.
    """

    data: bytes
    of_step: bool
    by_value: frozenset[str] = frozenset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A class with this method is sent as a signed pickle, because `data` contains code.
        vars(self).update(state)


def pack(slots: Mapping[str, Slot], imported: Digests, modules: Collection[str]) -> CodeChanges:
    """Pickle the values of changed slots.

    Args:
        slots: changed slots by name.
        imported: name of a slot → digest of the value that a rank imports.
        modules: names of the modules whose code is pickled by value.
    """
    values = {place: slot.value for place, slot in slots.items()}
    try:
        with by_value(modules):
            data = _pickled(values, imported)
    except Exception as error:  # reducers are foreign code and raise anything
        raise_if_of_handler(error)
        place = next((place for place, value in values.items() if not _is_portable(place, value, imported)), "")
        raise NotPortableError(
            f"{place.replace(':', '.')} was changed by this program, and the change cannot be sent to the workers:"
            f" {error}. Remove everything from it that cannot be copied (a lock, an open file)"
        ) from error
    of_step = any(slot.of_step and is_library(module_of(place)) for place, slot in slots.items())
    return CodeChanges(data, of_step, frozenset(modules))


@contextlib.contextmanager
def by_value(names: Iterable[str]) -> Iterator[None]:
    """Make cloudpickle pickle the functions and classes of some modules by value inside the `with` block.

    All threads of the process share the setting, so a block waits until the blocks of other threads have ended.
    `__main__` and modules that are not imported are ignored.
    """
    with _setting:
        known = cloudpickle.list_registry_pickle_by_value()
        modules = [sys.modules[name] for name in set(names) - known - {"__main__"} if name in sys.modules]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


# Lock for the list of modules that cloudpickle pickles by value.
_setting = threading.RLock()


class _CodePickler(ByValuePickler):
    """Pickles a replaced function by value, and the function that it replaces by name.

    `functools.wraps` gives both functions the same name. The replacement often calls the original function, which a
    rank can import by that name.
    """

    def __init__(self, buffer: io.BytesIO, places: Collection[str], imported: Digests) -> None:
        super().__init__(buffer, protocol=5)
        self._places, self._imported = places, imported

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, types.FunctionType) or (place := _place_named(obj)) not in self._places:
            return None
        return place if digest(obj) == self._imported.get(place) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and _place_named(obj) in self._places:
            return self._dynamic_function_reduce(obj)
        return super().reducer_override(obj)


def _place_named(function: types.FunctionType) -> str:
    """The slot's name that a function's own name gives: `module:qualified name`."""
    return f"{function.__module__}:{function.__qualname__}"


def _pickled(values: Mapping[str, Any], imported: Digests) -> bytes:
    buffer = io.BytesIO()
    _CodePickler(buffer, values.keys(), imported).dump(dict(values))
    return buffer.getvalue()


def _is_portable(place: str, value: Any, imported: Digests) -> bool:
    try:
        _pickled({place: value}, imported)
    except Exception as error:  # reducers are foreign code and raise anything
        raise_if_of_handler(error)
        return False
    return True
