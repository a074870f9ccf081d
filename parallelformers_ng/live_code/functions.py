"""Looks into functions: the functions that run if a value is called or read, and the names in their code."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

_BEHIND = {
    staticmethod: "__func__", classmethod: "__func__", types.MethodType: "__func__", property: "fget",
    functools.cached_property: "func", functools.partial: "func",
}  # fmt: skip
_WITH_FUNCTION = tuple(_BEHIND)


def function_behind(value: Any) -> Any:
    """The function that a method, a property or a partial function calls; None for any other value."""
    if not isinstance(value, _WITH_FUNCTION):  # first, because most values are plain functions
        return None
    return next(getattr(value, name) for kind, name in _BEHIND.items() if isinstance(value, kind))


def contents_of(cell: types.CellType) -> tuple[Any, ...]:
    """The value of a variable of an enclosing function; an empty tuple if the variable has no value."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def functions_in(value: Any, seen: frozenset[int] = frozenset()) -> Iterator[types.FunctionType]:
    """Yield the Python functions that run if a function, method, property or partial function is called or read.

    Wrapped functions and getters count. Of another object, only a function in `__wrapped__` counts.
    """
    while (behind := function_behind(value)) is not None:
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


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object, and the code of the functions and classes nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


@functools.cache
def words_in(code: types.CodeType) -> frozenset[str]:
    """The names and string constants in a code object; strings count because `getattr` takes names as strings."""
    strings = (part for each in codes_in(code) for part in each.co_consts if isinstance(part, str))
    return names_in(code).union(strings)


@functools.cache
def globals_in(code: types.CodeType) -> frozenset[str]:
    """The names that a code object, or a nested function or class, looks up or assigns in its globals."""
    instructions = (each for inner in codes_in(code) for each in dis.get_instructions(inner))
    return frozenset(each.argval for each in instructions if each.opname.endswith(("_GLOBAL", "LOAD_NAME")))


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals, attributes and imports in a code object, also in nested functions and classes.

    Local variables and variables of enclosing functions are left out.
    """
    return frozenset(name for each in codes_in(code) for name in each.co_names)


_STORES = frozenset({"STORE_SUBSCR", "STORE_ATTR", "DELETE_SUBSCR", "DELETE_ATTR"})
_MUTATORS = frozenset({
    "__setitem__", "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop",
    "popitem", "popleft", "register_buffer", "register_parameter", "remove", "setdefault", "subtract", "update",
})  # fmt: skip


def changed_variables(code: types.CodeType, are_global: bool) -> set[str]:
    """Global or local variables whose objects code changes: `x.… = …`, `x.…[…] = …`, `x.….append(…)`, `x.….add_(…)`."""
    load = "LOAD_GLOBAL" if are_global else "LOAD_"
    changed = set[str]()
    begins: dict[Any, str] = {}  # (line, column) → name of the variable at that position
    for instruction in dis.get_instructions(code):
        place = instruction.positions and (instruction.positions.lineno, instruction.positions.col_offset)
        name = instruction.argval if isinstance(instruction.argval, str) else ""
        if place in begins:
            # `torch.relu_(x)` does not change the global variable `torch`.
            in_place = name.endswith("_") and not name.endswith("__") and not are_global
            if in_place or name in _MUTATORS or instruction.opname in _STORES:
                changed.add(begins[place])
        elif instruction.opname.startswith(load) and name:
            begins[place] = name
    return changed
