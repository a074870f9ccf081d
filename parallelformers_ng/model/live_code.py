"""Sends the ranks code that they import differently, and later new values that code reads; refuses later code."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

from torch import nn

from parallelformers_ng.autopolicy.code_check import ATTENTION_SETTING, CodeCheck
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.live_code.changes import (
    ABSENT,
    attentions_of,
    classes_of,
    digests_of,
    is_by_value,
    is_filled_in,
)
from parallelformers_ng.live_code.content import digest, is_equal_code
from parallelformers_ng.live_code.functions import names_in
from parallelformers_ng.live_code.holders import value_in
from parallelformers_ng.live_code.object_graph import PLAIN, is_same
from parallelformers_ng.live_code.packing import CodeChanges, Digests, pack
from parallelformers_ng.live_code.reach import Slot, module_of, reach
from parallelformers_ng.live_code.state import State, is_code
from parallelformers_ng.live_code.stock import is_of_program, is_stock, words_of_program
from parallelformers_ng.live_code.watch import CodeWatch
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensors import dotted

log = logging.getLogger("parallelformers_ng")


class LiveCode:
    """The code that calls of a model use in this process, and its differences from the code on the ranks.

    Attributes:
        classes: classes of the model's modules.
        by_value: names of modules whose code is sent by value, because ranks cannot import the same code.
        changes: globals and class attributes whose values changed since `compare`; None before the first change.
        count: number of changes since `compare`.
        moved: module attributes whose objects changed in place, for `Edits` to take: (path, name) → value.
        step: detects changes of the code of a forward pass.
        rest: detects changes of the code that only `generate` and other methods use.
    """

    def __init__(self, model: nn.Module, plan: ShardPlan) -> None:
        self.check = CodeCheck(model, plan, plan.selection)
        self.classes = classes_of(model)
        self._functions = self.check.edits.functions
        self._attentions = attentions_of(model)
        self._slots = reach(self.classes, self._reached, self._attentions)
        self._on_ranks: Digests = {}
        self._lock = threading.Lock()
        modules = {cls.__module__ for cls in self.classes} | {module_of(place) for place in self._slots}
        self.by_value = {name for name in modules if is_by_value(name)}
        self.count = 0
        self.moved: dict[tuple[str, str], Any] = {}
        self._later: set[str] = set()
        self.changes: CodeChanges | None = None
        self._words: tuple[int, frozenset[str]] = -1, frozenset()
        self._watch()

    @property
    def _reached(self) -> list[Any]:
        return [*self._functions, *(value for _, _, value in self.check.edits.objects())]

    @property
    def words(self) -> frozenset[str]:
        """Names and strings in the user's code that the model may run."""
        if self._words[0] != self.count:
            self._words = self.count, frozenset(words_of_program((*self._functions_of_slots(), *self._functions)))
        return self._words[1]

    @property
    def names(self) -> frozenset[str]:
        """Names in all code that the model may run, including code of libraries."""
        return frozenset().union(*(names_in(function.__code__) for function in self._functions_of_slots()))

    def _functions_of_slots(self) -> set[FunctionType]:
        return {function for slot in self._slots.values() for function in slot.functions}

    def compare(self, differences: Callable[[Digests], Digests]) -> CodeChanges | None:
        """Return the code that the ranks import differently. `differences` sends digests to a rank for comparison.

        A module that the ranks cannot import at all is added to `by_value` instead.
        """
        local_digests = digests_of(self._slots)
        unlike = {p: d for p, d in differences(local_digests).items() if not is_filled_in(self._slots[p], d)}
        present = {module_of(place) for place in local_digests if unlike.get(place) != b""}
        absent = {module_of(place) for place in unlike} - present
        self.by_value |= absent
        unlike = {place: digest for place, digest in unlike.items() if module_of(place) not in absent}
        self._on_ranks = {**local_digests, **unlike}
        if not unlike:
            return None
        return pack({place: self._slots[place] for place in unlike}, self._on_ranks, self.by_value)

    def update(self) -> None:
        """Check code and values for changes: refuse changed code, and prepare changed values for the ranks."""
        with self._lock:
            if not (self.step.holds() and self.rest.holds()):
                self._update()

    def take_settings(self, model: Any, attributes: Mapping[tuple[str, str], Any], configs: Mapping[str, Any]) -> None:
        """Raise ParallelError if new settings do not fit the plan, or need an attention function that ranks lack."""
        with self._lock:
            if why := self.check.objection_to_settings(attributes, configs):
                names = [dotted(path, name) for path, name in attributes]
                names += [name.removesuffix("_internal") for name in configs]
                raise _refused(names, f"the plan is not valid for the new value: {why}")
            named = {value for name, value in configs.items() if name.endswith(ATTENTION_SETTING)} - self._attentions
            if named or not all(isinstance(value, PLAIN) for value in attributes.values()):
                slots = {**reach(self.classes, self._reached, self._attentions | named), **self._slots}
            else:
                slots = self._slots
            for place in slots.keys() - self._slots.keys():
                if named and not is_stock(slots[place]):
                    raise ParallelError(
                        f"config._attn_implementation was changed to {', '.join(map(repr, named))}, which runs"
                        f" {_in_short(place)}: code that the workers do not have. Restore the value, or call"
                        " deparallelize(), then parallelize() again"
                    )
            self._attentions |= named
            self._slots = slots
            self._watch()

    def _update(self) -> None:
        before, current = self._slots, reach(self.classes, self._reached, self._attentions)
        now = {place: replace(slot, value=_value_of(slot)) for place, slot in before.items()}
        changed = {
            place
            for place, slot in before.items()
            if not is_same(now[place].value, slot.value) and not is_equal_code(now[place].value, slot.value)
        }
        changed |= {place for place, slot in current.items() if place not in before and _is_new(slot)}
        now = {**current, **now}
        changed -= {p for p in changed if is_filled_in(now[p], digest(before[p].value) if p in before else ABSENT)}
        self._refuse_code({**current, **before}, changed)
        for owner, state in self._of_functions.items():
            if not state.holds():
                raise _refused([f"a value that {owner} reads"], "the workers have their own copy of it")
        changed |= {place for place, state in self._of_places.items() if not state.holds()}
        if changed:
            self._take_values(now, changed)
        for key, (value, state) in self._of_modules.items():
            if not state.holds():
                self.moved[key] = value
        # Leave out code that appeared after `parallelize`, so that a setting that names the code is refused.
        self._slots = {place: slot for place, slot in now.items() if place in before or not is_code(slot.value)}
        self._watch()

    def _refuse_code(self, slots: Mapping[str, Slot], changed: set[str]) -> None:
        """Raise ParallelError if the value of a `changed` slot is code, or if a function of `slots` has other code."""
        swapped = {id(f) for watch in (self.step, self.rest) for f in watch.changed_functions()}
        refused = {p for p in changed if any(map(is_code, (slots[p].value, _value_of(slots[p]))))}
        refused |= {p for p, slot in slots.items() if not swapped.isdisjoint(map(id, slot.functions))}
        refused |= {p for p, state in self._of_places.items() if state.has_other_code()}
        names = [*map(_in_short, sorted(refused))]
        if swapped and not names:
            names = ["a function that the program assigned to a module"]
        names += [dotted(path, name) for (path, name), (_, state) in self._of_modules.items() if state.has_other_code()]
        if names:
            why = "the workers keep the code that they got: code is frozen, only values may change"
            raise _refused(names, why, "it")

    def _take_values(self, slots: Mapping[str, Slot], changed: set[str]) -> None:
        if why := self.check.objection(changed):
            raise _refused([*map(_in_short, sorted(changed))], f"the plan is not valid for the new value: {why}")
        later = self._later | changed
        self.changes = pack({place: slots[place] for place in later}, self._on_ranks, self.by_value)
        self._later = later
        self.count += 1

    def _watch(self) -> None:
        edits = self.check.edits
        places = {slot.place: State(slot.value) for slot in self._slots.values() if _is_watched(slot)}
        modules = {(path, name): (value, State(value)) for path, name, value in edits.objects()}
        functions = {dotted(path, name): State(value) for path, name, value in edits.functions_by_path()}
        self._of_places = {place: state for place, state in places.items() if state}
        self._of_modules = {key: (value, state) for key, (value, state) in modules.items() if state}
        self._of_functions = {owner: state for owner, state in functions.items() if state}
        states = [*self._of_places.values(), *self._of_functions.values()]
        states += [state for _, state in self._of_modules.values()]
        for place in (place for place, state in self._of_places.items() if state.is_too_large):
            log.warning("%s is too large to follow: a change inside it, after parallelize, may not be noticed", place)
        self.step = CodeWatch((slot for slot in self._slots.values() if slot.of_step), states, self._functions)
        self.rest = CodeWatch(slot for slot in self._slots.values() if not slot.of_step)


def _refused(names: list[str], why: str, what: str = "the value") -> ParallelError:
    return ParallelError(
        f"{', '.join(names[:3])} was changed after the model was parallelized, and {why}. Restore {what}, or call"
        " deparallelize(), then parallelize() again"
    )


def _value_of(slot: Slot) -> Any:
    return value_in(slot.holder, slot.key, _REMOVED)


def _is_new(slot: Slot) -> bool:
    """Whether a global or class attribute that appeared after `parallelize` must be sent to the ranks or refused.

    A new function in a module need not be: if code calls it, the rank raises NameError.
    """
    return isinstance(slot.holder, type) or (is_of_program(slot.place) and not is_code(slot.value))


def _REMOVED() -> None:
    """Value of a deleted global or class attribute. As a function it counts as changed code, which is refused."""


def _in_short(place: str) -> str:
    """Shorten `module:Class.attribute` to `Class.attribute`, and `module:name` to `module.name`, for error messages."""
    module, _, name = place.partition(":")
    return name if "." in name or "[" in name else f"{module}.{name}"


def _is_watched(slot: Slot) -> bool:
    """Whether a global or class attribute may contain mutable objects of the user, and not only of a library."""
    return is_of_program(slot.place) or (callable(slot.value) and not is_stock(slot))
