"""Finds functions of the caller that write to global variables, which calls that run at the same time would share."""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

from parallelformers_ng.generation.call_arguments import code_of
from parallelformers_ng.live_code.functions import changed_variables, codes_in, globals_in
from parallelformers_ng.origins import is_library


def globals_written_by(root: Any) -> list[str]:
    """Return the names of the global variables that a callable writes to, itself or through functions that it names."""
    written, seen = set[str](), set[types.CodeType]()
    unread_functions = [code_of(root)]
    while unread_functions:
        function = unread_functions.pop()
        if not isinstance(function, types.FunctionType) or function.__code__ in seen:
            continue
        if is_library(function.__module__ or ""):
            continue
        seen.add(function.__code__)
        written |= _written_in(function.__code__)
        unread_functions += [function.__globals__.get(name) for name in globals_in(function.__code__)]
    return sorted(written)


@functools.lru_cache(256)
def _written_in(code: types.CodeType) -> frozenset[str]:
    """Return the globals that code, or a function nested in it, assigns or changes: `count = …`, `notes.append(…)`."""
    written = set[str]()
    for each in codes_in(code):
        written |= changed_variables(each, True)
        written |= {part.argval for part in dis.get_instructions(each) if part.opname == "STORE_GLOBAL"}
    return frozenset(written)
