"""Finds functions of the caller that write to global variables; writes on the ranks do not reach the caller."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

from parallelformers_ng.generation.object_state import LIBRARIES, code_of

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
    names, seen = dict[str, None](), set[types.CodeType]()
    unread_functions = [code_of(root)]
    while unread_functions:
        function = unread_functions.pop()
        if not isinstance(function, types.FunctionType) or function.__code__ in seen:
            continue
        if f"{function.__module__}.".startswith(LIBRARIES):
            continue
        seen.add(function.__code__)
        written, read = _names(function.__code__)
        names.update(dict.fromkeys(written))
        unread_functions += [function.__globals__.get(name) for name in read]
    return list(names)


@functools.lru_cache(256)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the global variables that code writes to, and the names of all that the code reads."""
    written, read = list[str](), dict[str, None]()
    for part in _parts(code):
        begins: dict[tuple[Any, Any], str] = {}  # (line, column) → name of the global variable at that position
        for instruction in dis.get_instructions(part):
            place = instruction.positions and (instruction.positions.lineno, instruction.positions.col_offset)
            if instruction.opname == "STORE_GLOBAL":
                written.append(instruction.argval)
            elif instruction.opname == "LOAD_GLOBAL":
                read[instruction.argval] = None
                if place is not None:
                    begins[place] = instruction.argval
            elif place in begins and (instruction.opname in _STORES or instruction.argval in _MUTATORS):
                written.append(begins[place])  # `notes[…] = `, `notes.count = `, `notes.append`
    return tuple(dict.fromkeys(written)), tuple(read)


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and all nested code objects."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)
