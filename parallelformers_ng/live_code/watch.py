"""Detects within microseconds that code which a model's methods use has been replaced."""

from __future__ import annotations

import copyreg
import operator
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.utils.generic import GeneralInterface

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.live_code.content import digest, instructions
from parallelformers_ng.live_code.functions import functions_in
from parallelformers_ng.live_code.holders import Tables
from parallelformers_ng.live_code.reach import STEP, Slot, module_of
from parallelformers_ng.live_code.state import State
from parallelformers_ng.origins import is_known, is_library

try:
    from parallelformers_ng.live_code._places import are_unchanged, have_parts
except ImportError:  # installed without a compiler
    are_unchanged = None  # type: ignore[assignment]

    def have_parts(functions: tuple[types.FunctionType, ...], parts: tuple[Any, ...], /) -> bool:
        return all(map(operator.is_, parts, _parts_of(functions)))


class CodeWatch:
    """Detects whether code that is looked up by name was replaced since the watch began.

    Args:
        slots: class attributes, globals and registry entries to watch, with their values.
        states: mutable objects that the code reads.
        functions: further functions that the code runs.
    """

    def __init__(
        self, slots: Iterable[Slot], states: Iterable[State] = (), functions: Iterable[types.FunctionType] = ()
    ) -> None:
        self._states = tuple(states)
        slots = list(slots)
        further = (part for function in functions for part in functions_in(function))
        self._functions = tuple(dict.fromkeys((*(part for slot in slots for part in slot.functions), *further)))
        self._parts = tuple(_parts_of(self._functions))
        tables = Tables()
        self._attributes = [(f, dict(vars(f))) for f in self._functions if not is_library(f.__globals__["__name__"])]
        for function, attributes in self._attributes:
            tables.of(vars(function)).hold(attributes)
        program = {module for module in {module_of(slot.place) for slot in slots} if not is_library(module)}
        for slot in slots:
            of_program, of_class = module_of(slot.place) in program, isinstance(slot.holder, type)
            if of_program or (of_class and slot.key in STEP):
                if of_class:
                    copyreg._slotnames(slot.holder)  # type: ignore[attr-defined]  # pickle would add an attribute to the class later
                tables.of(slot.holder).hold({})  # a new name may hide another, or be read by getattr with a default
            if of_program and isinstance(slot.value, types.ModuleType) and not is_library(slot.value.__name__):
                tables.of(vars(slot.value)).hold({})
            if isinstance(slot.holder, GeneralInterface):
                tables.of(slot.holder._local_mapping).hold({})  # a new entry of the object would hide one of the class
            if slot.key in (table := tables.of(slot.holder, slot.key)).items:
                table.values[slot.key] = slot.value
        tables.of(torch.Tensor).hold({})
        self._tables = [*tables.values()]
        columns = (
            (table.items, tuple(table.values), tuple(table.values.values()), table.size, table.owner)
            for table in self._tables
        )
        self._fast: tuple[Any, ...] = (*zip(*columns, strict=True), bytearray(4 * len(tables)))

    def holds(self) -> bool:
        """Whether no watched code and no watched object has changed since the watch began."""
        if self._states and not all(state.holds() for state in self._states):
            return False
        if not have_parts(self._functions, self._parts):
            return False
        if are_unchanged is not None and are_unchanged(*self._fast):
            return True
        return all(table.holds() for table in self._tables)  # slower: also accepts new objects that are equal

    def changed_functions(self) -> Iterator[types.FunctionType]:
        """Yield the functions whose code, defaults or attributes were exchanged in place for others."""
        for number, function in enumerate(self._functions):
            code, *defaults = self._parts[3 * number : 3 * number + 3]
            is_equal = instructions(function.__code__) == instructions(code)
            if not is_equal or digest(defaults) != digest([function.__defaults__, function.__kwdefaults__]):
                yield function
        yield from (function for function, attributes in self._attributes if vars(function) != attributes)


def _parts_of(functions: tuple[types.FunctionType, ...]) -> Iterator[Any]:
    for function in functions:
        yield from (function.__code__, function.__defaults__, function.__kwdefaults__)


def refuse_modes() -> None:
    """Raise ParallelError if a torch function mode or dispatch mode of the program is active in this thread, or
    `torch.func`."""
    if torch._C._is_tracing():
        raise ParallelError(
            "torch.jit.trace cannot record a parallelized model: its workers compute. Call deparallelize() first"
        )
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        raise ParallelError(
            "a parallelized model cannot be called inside torch.func (grad, vmap, jvp, …) or forward-mode"
            " differentiation: the workers compute plain tensors without gradients. Call deparallelize() first"
        )
    if not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()):
        return
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if not is_known(type(mode)):
            raise ParallelError(
                f"the mode {type(mode).__name__} is active and changes torch functions in this process, but not on the"
                " workers. Leave the mode before the call, or call deparallelize() first"
            )
