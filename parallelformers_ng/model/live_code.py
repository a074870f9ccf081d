"""Keeps the code on the ranks equal to the code in the caller's process, even if the caller's code changes later."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from parallelformers_ng.autopolicy.code_check import ATTENTION_SETTING, CodeCheck
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.live_code.changes import (
    attentions_of,
    classes_of,
    digests_of,
    is_by_value,
    is_filled_in,
    is_local,
)
from parallelformers_ng.live_code.content import digest
from parallelformers_ng.live_code.packing import CodeChanges, Digests, pack
from parallelformers_ng.live_code.reach import Slot, functions_in, module_of, names_in, package_named_in, reach
from parallelformers_ng.live_code.state import State
from parallelformers_ng.live_code.stock import is_of_program, is_stock, words_of_program
from parallelformers_ng.live_code.watch import CodeWatch

_FOLLOWED = ("torch", "transformers")


class LiveCode:
    """The code that calls of a model use in this process, and its differences from the code on the ranks.

    Args:
        model: the model, before it is parallelized.
        check: test whether the plan is valid for changed code.

    Attributes:
        check: argument `check`.
        by_value: names of modules whose code is sent by value, because ranks cannot import the same code.
        changes: changes of the code since `compare`; None before the first change.
        count: number of changes of the code since `compare`.
        moved: attributes of modules whose objects changed inside: (path, name) → number of the change, value.
        step: watch of the code of a forward pass.
        rest: watch of the code that only `generate` and other methods use.
    """

    def __init__(self, model: nn.Module, check: CodeCheck) -> None:
        self._classes = classes_of(model)
        self._functions = check.edits.functions
        self.check = check
        self._attentions = attentions_of(model)
        self._slots = reach(self._classes, self._functions, self._attentions)
        self._on_ranks: Digests = {}
        self._sent: set[str] = set()
        self._lock = threading.Lock()
        modules = {cls.__module__ for cls in self._classes} | {module_of(place) for place in self._slots}
        self.by_value = {name for name in modules if is_by_value(name)}
        self.count = 0
        self.moved: dict[tuple[str, str], tuple[int, Any]] = {}
        self._moved_places: set[str] = set()
        self._numbers = itertools.count(1)
        self.changes: CodeChanges | None = None
        self._words: tuple[int, frozenset[str]] = -1, frozenset()
        self._watch()

    @property
    def words(self) -> frozenset[str]:
        """The names and strings in the program's code that the model reaches."""
        if self._words[0] != self.count:
            values = (*(slot.value for slot in self._slots.values()), *self._functions)
            self._words = self.count, frozenset(words_of_program(values))
        return self._words[1]

    @property
    def names(self) -> frozenset[str]:
        """The names in all code that the model reaches, also in code of libraries."""
        functions = (function for slot in self._slots.values() for function in functions_in(slot.value))
        return frozenset().union(*(names_in(function.__code__) for function in functions))

    def compare(self, differences: Callable[[Digests], Digests]) -> CodeChanges | None:
        """Find the code that differs from the ranks' imported code.

        A module whose code the ranks lack entirely is added to `by_value`, and is not part of the result.

        Args:
            differences: function that compares digests with the code of a rank; see `live_code.changes.differences`.
                Exceptions of the function are passed on.

        Returns:
            Code to send to the ranks; None if no code differs.

        Raises:
            NotPortableError: code that differs cannot be sent to the ranks.
        """
        local_digests = digests_of(self._slots)
        unlike = {p: d for p, d in differences(local_digests).items() if not is_filled_in(self._slots[p], d)}
        present = {module_of(place) for place in local_digests if unlike.get(place) != b""}
        absent = {module_of(place) for place in unlike} - present
        self.by_value |= absent
        unlike = {place: digest for place, digest in unlike.items() if module_of(place) not in absent}
        self._on_ranks = {**local_digests, **unlike}
        self._sent = set(unlike)
        if not unlike:
            return None
        return pack({place: self._slots[place] for place in unlike}, self._on_ranks, modules=self.by_value)

    def update(self) -> None:
        """Compare the code with its last known state, and prepare the changes for the ranks.

        Raises:
            ParallelError: the plan of the model is not valid for the changed code.
            NotPortableError: a change of the code cannot be sent to the ranks.
        """
        with self._lock:
            if not (self.step.holds() and self.rest.holds()):
                self._update()

    def take_settings(self, model: Any, attributes: Mapping[tuple[str, str], Any], configs: Mapping[str, Any]) -> None:
        """Check that the plan fits new settings, and follow the code of attention functions that they name.

        Args:
            model: the parallelized model.
            attributes: attributes that the program set: (path of a module, name) → value.
            configs: dotted name of an attribute of a configuration → new value.

        Raises:
            ParallelError: the plan of the model is not valid for the settings.
            NotPortableError: the code of an attention function cannot be sent to the ranks.
        """
        with self._lock:
            attention = getattr(model.config, "_attn_implementation", None)
            if why := self.check.objection_to_settings(attributes, configs, attention):
                names = [f"{path}.{name}" for path, name in attributes]
                names += [name.removesuffix("_internal") for name in configs]
                raise ParallelError(
                    f"{', '.join(names[:3])} was changed after the model was parallelized, and the plan is not valid"
                    f" for the new value: {why}. Restore the value, or call deparallelize(), then parallelize() again"
                )
            named = {
                value
                for name, value in configs.items()
                if name.endswith(ATTENTION_SETTING) and isinstance(value, str) and value not in self._attentions
            }
            if named:
                self._attentions |= named
                self._update()
            self._watch()

    def _update(self) -> None:
        before, current = self._slots, reach(self._classes, self._functions, self._attentions)
        changed_places = {
            place
            for place in before.keys() | current.keys()
            if place not in before or place not in current or before[place].value is not current[place].value
        }
        for owner, state in self._of_functions.items():
            if not state.holds():
                raise ParallelError(
                    f"a value that {owner} reads was changed after the model was parallelized, and the workers have"
                    " their own copy of it. Restore the value, or call deparallelize(), then parallelize() again"
                )
        moved_places = {place for place, state in self._of_places.items() if not state.holds()} & current.keys()
        changed_places |= moved_places
        self._moved_places |= moved_places
        for key, (value, state) in self._of_modules.items():
            if not state.holds():
                self.moved[key] = next(self._numbers), value
        if not changed_places:
            return self._watch()
        if why := self.check.objection(changed_places):
            known = changed_places & before.keys()
            names = ", ".join(sorted(map(_in_short, known & current.keys() or known))[:3])
            raise ParallelError(
                f"{names} was changed after the model was parallelized, and the plan is not valid for the new code:"
                f" {why}. Call deparallelize(), then parallelize() again"
            )
        current_digests = {place: digest(slot.value) for place, slot in current.items()}
        values = {
            place: slot
            for place, slot in current.items()
            if place in self._moved_places
            or (current_digests[place] != self._on_ranks.get(place) and not self._is_known(slot, before))
        }
        restored = self._sent - values.keys()
        self.changes = pack(values, self._on_ranks, restored, self.by_value)
        self._sent |= set(values)
        self._slots = current
        self.count += 1
        self._watch()

    def _is_known(self, slot: Slot, before: dict[str, Slot]) -> bool:
        """Return whether ranks already have the value of a slot that `compare` did not check: stock code that newly
        became reachable, or unchanged code of a module in `by_value`."""
        if slot.place in self._on_ranks:
            return False
        if is_local(slot.place) or module_of(slot.place) in self.by_value:
            return slot.place in before and before[slot.place].value is slot.value and slot.place not in self._sent
        is_plain = isinstance(slot.value, (bool, int, float, str, property))
        return package_named_in(slot.place) in _FOLLOWED and not is_plain and is_stock(slot)

    def _watch(self) -> None:
        edits = self.check.edits
        places = {slot.place: State(slot.value) for slot in self._slots.values() if _is_watched(slot)}
        modules = {(path, name): (value, State(value)) for path, name, value in edits.objects()}
        functions = {f"{path}.{name}": State(value) for path, name, value in edits.functions_by_path()}
        self._of_places = {place: state for place, state in places.items() if state}
        self._of_modules = {key: (value, state) for key, (value, state) in modules.items() if state}
        self._of_functions = {owner: state for owner, state in functions.items() if state}
        states = [*self._of_places.values(), *self._of_functions.values()]
        states += [state for _, state in self._of_modules.values()]
        self.step = CodeWatch((slot for slot in self._slots.values() if slot.of_step), states)
        self.rest = CodeWatch(slot for slot in self._slots.values() if not slot.of_step)


def _in_short(place: str) -> str:
    """Return a place in the form of error messages: `Class.attribute`, or `module.global`."""
    module, _, name = place.partition(":")
    return name if "." in name or "[" in name else f"{module}.{name}"


def _is_watched(slot: Slot) -> bool:
    """Return whether a place may hold mutable objects of the program: the place or the value is not a library's."""
    return is_of_program(slot.place) or (callable(slot.value) and not is_stock(slot))
