"""Finds functions of the caller that write to global variables, which calls that run at the same time would share."""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

from parallelformers_ng.generation.call_arguments import code_of
from parallelformers_ng.generation.object_parts import is_own_code

_MUTATORS = frozenset({
    "__setitem__", "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop",
    "popitem", "popleft", "remove", "setdefault", "subtract", "update",
})  # fmt: skip
_STORES = frozenset({"STORE_SUBSCR", "STORE_ATTR", "DELETE_SUBSCR", "DELETE_ATTR"})


def globals_written_by(root: Any) -> list[str]:
    """Return the names of the global variables that a callable writes to, directly or through functions that it names.

    Args:
        root: a function, a method, or an object with `__call__`.
    """
    written, seen = set[str](), set[types.CodeType]()
    unread_functions = [code_of(root)]
    while unread_functions:
        function = unread_functions.pop()
        if not isinstance(function, types.FunctionType) or function.__code__ in seen:
            continue
        if not is_own_code(function.__module__ or ""):
            continue
        seen.add(function.__code__)
        read, changed = _global_names(function.__code__)
        written |= changed
        unread_functions += [function.__globals__.get(name) for name in read]
    return sorted(written)


@functools.lru_cache(256)
def _global_names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the names of the global variables that code, and functions within the code, read, and that they change.

    `notes[…] = `, `notes.count = ` and `notes.append(…)` change the variable `notes`.
    """
    read, changed = set[str](), set[str]()
    begins: dict[Any, str] = {}  # (line, column) → name of the global variable at that position
    for instruction in dis.get_instructions(code):
        place = instruction.positions and (instruction.positions.lineno, instruction.positions.col_offset)
        if instruction.opname == "STORE_GLOBAL":
            changed.add(instruction.argval)
        elif instruction.opname == "LOAD_GLOBAL":
            read.add(instruction.argval)
            begins[place] = instruction.argval
        elif place in begins and (instruction.opname in _STORES or instruction.argval in _MUTATORS):
            changed.add(begins[place])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_read, inner_changed = _global_names(constant)
            read |= inner_read
            changed |= inner_changed
    return read, changed
