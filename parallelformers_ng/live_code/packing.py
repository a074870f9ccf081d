"""Values for places of code, as they travel to the ranks: pickled by value."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from parallelformers_ng.errors import NotPortableError
from parallelformers_ng.live_code.content import digest
from parallelformers_ng.live_code.reach import Slot

Digests = dict[str, bytes]
"""Place → digest of what it holds."""


@dataclass(frozen=True)
class CodeChanges:
    """Values for places of code, as they travel to the ranks.

    Attributes:
        data: a pickle of place → value.
        restored: places that hold again what a rank imports by itself.
        of_step: whether a forward pass reaches one of them.
        by_value: modules whose code came to the ranks by value, as no import finds it.
    """

    data: bytes
    restored: tuple[str, ...]
    of_step: bool
    by_value: frozenset[str] = frozenset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """With this it travels as a pickle, which is signed: `data` is code."""
        vars(self).update(state)


def pack(
    slots: Mapping[str, Slot],
    imported: Digests,
    restored: Iterable[str] = (),
    modules: Collection[str] = frozenset(),
) -> CodeChanges:
    """Take values of places to the wire.

    Args:
        slots: the places and their values.
        imported: place → digest of what a rank imports there by itself.
        restored: places that hold again what a rank imports by itself.
        modules: names of the modules whose code travels by value.

    Raises:
        NotPortableError: one cannot cross; the message names its place.
    """
    values = {place: slot.value for place, slot in slots.items()}
    try:
        with by_value(modules):
            data = _pickled(values, imported)
    except Exception as error:  # reducers are foreign code and raise anything
        place = next((place for place, value in values.items() if not _is_portable(place, value, imported)), "")
        raise NotPortableError(
            f"{place.replace(':', '.')} was changed by this program, and the change cannot be sent to the workers:"
            f" {error}. Have it hold nothing that cannot be copied (a lock, an open file)"
        ) from error
    return CodeChanges(data, tuple(restored), any(slot.of_step for slot in slots.values()), frozenset(modules))


@contextlib.contextmanager
def by_value(names: Iterable[str]) -> Iterator[None]:
    """Within it, what these modules define is pickled by value."""
    known = cloudpickle.list_registry_pickle_by_value()
    modules = [sys.modules[name] for name in set(names) - known - {"__main__"} if name in sys.modules]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


class _CodePickler(cloudpickle.Pickler):
    """Takes the functions of some places by value, even under the name of the place: `functools.wraps` names a
    function after the one it replaces. It often calls the original: that travels as the name of the place."""

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
    """Return the place that a function is named after."""
    return f"{function.__module__}:{function.__qualname__}"


def _pickled(values: Mapping[str, Any], imported: Digests) -> bytes:
    buffer = io.BytesIO()
    _CodePickler(buffer, values.keys(), imported).dump(dict(values))
    return buffer.getvalue()


def _is_portable(place: str, value: Any, imported: Digests) -> bool:
    try:
        _pickled({place: value}, imported)
    except Exception:  # see `pack`
        return False
    return True
