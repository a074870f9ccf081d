"""Finds code that differs between the caller and a rank, and applies the caller's changes on the rank."""

from __future__ import annotations

import importlib
import operator
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from parallelformers_ng.live_code.content import digest, original
from parallelformers_ng.live_code.holders import table_of, value_in
from parallelformers_ng.live_code.loaded_by_path import has_source, is_loaded_by_path
from parallelformers_ng.live_code.packing import CodeChanges, Digests
from parallelformers_ng.live_code.reach import Slot, module_of, package_named_in, reach, scopes_of
from parallelformers_ng.origins import CORE, package_of
from parallelformers_ng.wire.by_value import ReferenceUnpickler
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

# Digest that stands for "this name has no value in the other process".
ABSENT = b""
_NOTHING = object()
# Attributes that transformers caches on every model class at first use; they are no changes of the program.
_FILLED_IN = ("_can_set_attn_implementation_cached_value", "_can_set_experts_implementation_cached_value")
# Registry of transformers 5.17 for the classes of all models of a process; a rank always has a different registry.
_BUILT = "transformers.utils.output_capturing:_CAN_RECORD_REGISTRY"


def attentions_of(model: nn.Module) -> set[str]:
    """Names of the attention functions that a model may call."""
    configs = {getattr(getattr(module, "config", None), "_attn_implementation", None) for module in model.modules()}
    return {name for name in configs if isinstance(name, str)} | {"sdpa", "eager"}


def classes_of(model: nn.Module) -> set[type]:
    """Classes of a model's modules; a parametrized module counts with its class before parametrization."""
    return {parametrize.type_before_parametrizations(module) for module in model.modules()}


def digests_of(slots: Mapping[str, Slot]) -> Digests:
    """Return slot name → digest of the slot's value, for the slots of modules that a rank can import."""
    by_value = {name for name in {module_of(place) for place in slots} if is_by_value(name)}
    return {
        place: digest(slot.value)
        for place, slot in slots.items()
        if not is_local(place) and module_of(place) not in by_value
    }


def differences(digests: Digests) -> Digests:
    """Compare digests from another process with the values of this process, which imports the slots' modules for that.

    Returns:
        Name of a slot that differs → digest of its value in this process, or `ABSENT` if it has no value here.
    """
    own_digests: Digests = {}
    for place, other_digest in digests.items():
        value = _look_up(place)
        known_value, own_digest = _REMEMBERED.get(place, (_NOTHING, ABSENT))
        if value is not known_value:
            own_digest = ABSENT if value is _NOTHING else digest(value)
        if own_digest != other_digest:
            own_digests[place] = own_digest
    return own_digests


# Cache of digests: name of a slot → the function in it, and the function's digest.
_REMEMBERED: dict[str, tuple[types.FunctionType, bytes]] = {}


def remember_functions(classes: Iterable[type]) -> None:
    """Cache the digests of the functions that these classes can call, for all processes that this process will fork.

    A fork that digests a function itself copies every page of memory that it reads, because reading an object counts a
    reference. No program runs here or in the forks before they compare code, so the functions stay as they are.
    """
    slots = reach(classes).items()
    values = {place: slot.value for place, slot in slots if isinstance(slot.value, types.FunctionType)}
    _REMEMBERED.update({place: (value, digest(value)) for place, value in values.items()})


def is_filled_in(slot: Slot, here: bytes) -> bool:
    """Whether a slot differs from a rank's digest `here` only because transformers fills it at first use."""
    if slot.place == _BUILT or (slot.key in _FILLED_IN and here == ABSENT):
        return True
    if not slot.place.startswith("transformers.") or not slot.key.startswith("_"):
        return False
    imported = here == digest(None) and package_of(slot.value) in ("torch", "transformers", "flash_attn")
    return imported or (here == ABSENT and isinstance(slot.value, (bool, int, str)))


class AppliedChanges:
    """The program's code changes that a rank has applied. `of_step`: whether a forward pass runs changed code of a
    library."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[Any, str, Any]] = {}
        self.of_step = False

    def apply(self, changes: CodeChanges, model: nn.Module | None) -> None:
        """Unpickle the new values and assign them by name. Unpickling runs code, so the sender must be trusted."""
        values = ReferenceUnpickler(changes.data, self._imported).load()
        classes = set() if model is None else {type(module) for module in model.modules()}
        for place, value in values.items():
            if not is_local(place) and module_of(place) not in changes.by_value:
                holder, key = _holder_of(place)
                self._before.setdefault(place, (holder, key, value_in(holder, key, _NOTHING)))
                _put(holder, key, value)
        copied = {place: value for place, value in values.items() if may_be_copied(place)}
        scopes = scopes_of(classes, values.values()) if copied else {}
        named_classes = {f"{base.__module__}:{base.__qualname__}": base for cls in classes for base in cls.__mro__}
        for place, value in copied.items():
            _put_by_value(place, value, named_classes, scopes)
        self.of_step |= changes.of_step

    def undo(self) -> None:
        self.of_step = False
        while self._before:
            _, (holder, key, value) = self._before.popitem()
            _put(holder, key, value)

    def _imported(self, place: str) -> Any:
        """The value that a slot had when this rank imported it, before any change."""
        return self._before[place][2] if place in self._before else _look_up(place)


def is_local(place: str) -> bool:
    """Whether the slot of this name belongs to a class that is defined in a function, and so is pickled by value."""
    return "<locals>" in place


def may_be_copied(place: str) -> bool:
    """Whether the slot of this name is in a program's module, so that code pickled by value may have a copy of it."""
    return not place.endswith("]") and package_named_in(place) not in CORE


def is_by_value(name: str) -> bool:
    """Whether the code of a module must be pickled by value, because a rank cannot import the same code."""
    if name == "__main__" or name not in sys.modules:
        return True
    return package_named_in(name) not in CORE and is_loaded_by_path(name) and not has_source(name)


def _look_up(place: str) -> Any:
    try:
        holder, key = _holder_of(place)
    except (ImportError, AttributeError, KeyError):
        return _NOTHING
    return original(value_in(holder, key, _NOTHING))


def _holder_of(place: str) -> tuple[Any, str]:
    """The class, the globals or the registry of a place in this process, and the key of the place's value.

    Args:
        place: `module:Class.attribute`, `module:global` or `module:registry[key]`.
    """
    name, _, path = place.partition(":")
    try:
        module = importlib.import_module(name)
    except Exception as error:  # an import runs the module's code, which may raise any error
        raise_if_of_handler(error)
        raise ImportError(f"{name} cannot be imported here: {error}") from error
    if path.endswith("]"):
        path, _, key = path[:-1].partition("[")
        return operator.attrgetter(path)(module), key
    owner, _, key = path.rpartition(".")
    return (operator.attrgetter(owner)(module), key) if owner else (vars(module), key)


def _put(holder: Any, key: str, value: Any) -> None:
    """Assign a value to a class attribute, global or registry entry, or delete it if the value is `_NOTHING`."""
    if isinstance(holder, type):
        delattr(holder, key) if value is _NOTHING else setattr(holder, key, value)
        return
    table = table_of(holder, key)
    if value is _NOTHING:
        table.pop(key, None)
    else:
        table[key] = value


def _put_by_value(
    place: str, value: Any, classes: Mapping[str, type], scopes: Mapping[str, list[dict[str, Any]]]
) -> None:
    """Set the value of a place in the classes and globals of code that was pickled by value."""
    owner, _, key = place.rpartition(".")
    if ":" in owner:
        for cls in [classes[owner]] if owner in classes else _classes_named(owner, scopes):
            setattr(cls, key, value)
        return
    module, _, key = place.partition(":")
    for scope in scopes.get(module, ()):
        scope[key] = value


def _classes_named(place: str, scopes: Mapping[str, list[dict[str, Any]]]) -> list[type]:
    """Find the classes of this name in the globals of code that was pickled by value."""
    module, _, path = place.partition(":")
    first, *rest = path.split(".")
    values = [scope.get(first) for scope in scopes.get(module, ())]
    for name in rest:
        values = [getattr(value, name, None) for value in values]
    return [value for value in values if isinstance(value, type)]
