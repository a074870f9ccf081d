"""Finds the program's code on modules, and whether that code may change the modules during a call."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from parallelformers_ng.live_code.functions import changed_variables, codes_in, functions_in, names_in
from parallelformers_ng.origins import is_known

_GENERAL = {*PreTrainedModel.__mro__, *GenerationMixin.__mro__}
_NOT_OF_CALLS = frozenset({"__init__", "_init_weights", "extra_repr", "__setstate__", "__getstate__"})


def own_names(model: nn.Module) -> dict[str, frozenset[str]]:
    """Path of each module with code of the program → the names in that code."""
    names: dict[str, frozenset[str]] = {}
    known: dict[type, list[types.FunctionType]] = {}
    for path, module in model.named_modules():
        if functions := list(_own_functions(module, known)):
            names[path] = frozenset().union(*(names_in(function.__code__) for function in functions))
    return names


def changes_itself(model: nn.Module) -> bool:
    """Whether calls may change the model: code of the program sets attributes of modules or changes their values in
    place, or an embedding renormalizes its weights."""
    known: dict[type, list[types.FunctionType]] = {}
    modules = list(model.modules())
    functions = {function for module in modules for function in _own_functions(module, known)}
    return any(map(renormalizes, modules)) or any(_changes_first_argument(function.__code__) for function in functions)


def renormalizes(module: nn.Module) -> bool:
    return getattr(module, "max_norm", None) is not None


def may_write(module: nn.Module, name: str) -> bool:
    """Whether the program's code on a module may write to a tensor of this name in the module or a submodule."""
    functions = _own_functions(module, {})
    return any(name in names_in(each.__code__) and _changes_first_argument(each.__code__) for each in functions)


def _own_functions(module: nn.Module, known: dict[type, list[types.FunctionType]]) -> Iterator[types.FunctionType]:
    """Yield the functions of the program on a module and its class; `known` has those of classes seen before."""
    cls = type(module)
    if cls not in known:
        tables = [vars(base) for base in cls.__mro__ if base not in _GENERAL]
        members = (value for table in tables for name, value in table.items() if name not in _NOT_OF_CALLS)
        known[cls] = [each for value in members for each in functions_in(value) if not is_known(each)]
    yield from known[cls]
    for value in vars(module).values():
        if isinstance(value, (types.FunctionType, types.MethodType)):
            yield from itertools.filterfalse(is_known, functions_in(value))


def _changes_first_argument(code: types.CodeType) -> bool:
    """Whether a function, or a function nested in it, changes its own first argument, `self`."""
    return any(
        each.co_varnames[:1] and each.co_varnames[0] in changed_variables(each, False) for each in codes_in(code)
    )
