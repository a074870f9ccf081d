"""Looks into functions: the functions that run if a value is called or read, and the names in their code."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

_BEHIND = (
    ((staticmethod, classmethod, types.MethodType), "__func__"),
    (property, "fget"),
    ((functools.cached_property, functools.partial), "func"),
)


def function_behind(value: Any) -> Any:
    """Return the function that a method, a property or a partial function calls; None for any other value."""
    return next((getattr(value, name) for kinds, name in _BEHIND if isinstance(value, kinds)), None)


def contents_of(cell: types.CellType) -> tuple[Any, ...]:
    """Return the value of a variable of an enclosing function; an empty tuple if the variable has no value."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def functions_in(value: Any, seen: frozenset[int] = frozenset()) -> Iterator[types.FunctionType]:
    """Yield the Python functions that run if `value` is called or read, including wrapped functions and getters.

    Args:
        value: a function, method, property or partial function. Of another object, only a function in `__wrapped__`
            counts.
        seen: ids of functions to leave out.
    """
    while not isinstance(value, types.FunctionType) and (behind := function_behind(value)) is not None:
        value = behind
    if id(value) in seen:
        return
    seen |= {id(value)}
    if isinstance(value, types.FunctionType):
        yield value
        for cell in value.__closure__ or ():
            for inner in contents_of(cell):
                yield from functions_in(inner, seen)
    if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
        yield from functions_in(wrapped, seen)


@functools.cache
def words_in(code: types.CodeType) -> frozenset[str]:
    """Return the names and the strings in a code object, also in nested functions."""
    inner = (words_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner, (part for part in code.co_consts if isinstance(part, str)))


@functools.cache
def globals_in(code: types.CodeType) -> frozenset[str]:
    """Return the names that a code object, or a nested function or class, looks up in its globals."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    own = (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return frozenset(own).union(*map(globals_in, inner))


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals, attributes and imports in a code object, also in nested functions and classes.

    Local variables and variables of enclosing functions are left out.
    """
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*map(names_in, inner))
