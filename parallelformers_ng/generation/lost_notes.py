"""Finds functions of the caller that write to global variables; writes on the ranks do not reach the caller."""

from __future__ import annotations

import types
from typing import Any

from parallelformers_ng.generation.object_state import LIBRARIES, code_of, global_names


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
        if f"{function.__module__}.".startswith(LIBRARIES):
            continue
        seen.add(function.__code__)
        read, assigned, changed = global_names(function.__code__)
        written |= assigned | changed
        unread_functions += [function.__globals__.get(name) for name in read]
    return sorted(written)
