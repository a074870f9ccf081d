"""Detects within microseconds that code which a model's methods use has been replaced."""

from __future__ import annotations

import copyreg
import gc
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.utils.generic import GeneralInterface

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.live_code.reach import LIBRARIES, STEP, Slot, package_of
from parallelformers_ng.live_code.state import State

try:
    from parallelformers_ng.live_code._places import are_unchanged
except ImportError:  # installed without a compiler
    are_unchanged = None  # type: ignore[assignment]


class CodeWatch:
    """Compares places of code with the values that the places had when the watch began.

    Args:
        slots: places and their values.
        states: mutable objects that the code reads.
    """

    def __init__(self, slots: Iterable[Slot], states: Iterable[State] = ()) -> None:
        self._states = tuple(states)
        groups: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        classes: dict[int, dict[str, Any]] = {}
        for slot in slots:
            table = _table_of(slot.holder)
            if slot.key in STEP and isinstance(slot.holder, type):
                classes[id(table)] = table
                copyreg._slotnames(slot.holder)  # type: ignore[attr-defined]  # pickle would add an attribute to the class later
            if slot.key in table:
                groups.setdefault(id(table), (table, {}))[1][slot.key] = slot.value
        self._tables = tuple(table for table, _ in groups.values())
        self._keys = tuple((*values, *list(values)[:1]) for _, values in groups.values())
        self._getters = [operator.itemgetter(*keys) for keys in self._keys]  # with two keys or more, they return tuples
        self._values = tuple(getter(table) for getter, table in zip(self._getters, self._tables, strict=True))
        self._classes = (*classes.values(), _table_of(torch.Tensor))
        self._sizes = tuple(map(len, self._classes))

    def holds(self) -> bool:
        """Return whether all places and states have their first values, and each watched class as many attributes."""
        if self._states and not all(state.holds() for state in self._states):
            return False
        if are_unchanged is not None and are_unchanged(
            self._tables, self._keys, self._values, self._classes, self._sizes
        ):
            return True
        try:  # another object may still be an equal one
            same = tuple(map(operator.call, self._getters, self._tables)) == self._values
            return same and tuple(map(len, self._classes)) == self._sizes
        except (KeyError, RuntimeError, ValueError):  # a value is missing, or is a tensor now
            return False


def refuse_modes() -> None:
    """Check that no torch function mode or dispatch mode of the program is active in this thread, nor `torch.func`.

    Raises:
        ParallelError: a mode is active whose class does not belong to a package in `LIBRARIES`. Or a level of
            `torch.func` or of `torch.autograd.forward_ad` is active.
    """
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        raise ParallelError(
            "a parallelized model cannot be called inside torch.func (grad, vmap, jvp, …) or forward-mode"
            " differentiation: the workers compute plain tensors without gradients. Call deparallelize() first"
        )
    if not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()):
        return
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if package_of(type(mode)) not in LIBRARIES:
            raise ParallelError(
                f"the mode {type(mode).__name__} is active and changes torch functions in this process, but not on the"
                " workers. Leave the mode before the call, or call deparallelize() first"
            )


def _table_of(holder: Any) -> dict[str, Any]:
    """Return the dictionary with the values of a class, of a module's globals or of a registry."""
    if isinstance(holder, type):
        table: dict[str, Any] = gc.get_referents(vars(holder))[0]  # a mapping proxy is slower to read
        return table
    if isinstance(holder, GeneralInterface):
        return holder._local_mapping or type(holder)._global_mapping
    return holder
