"""Finds the modules of a model that run foreign code: code that no known library defines."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.utils.generic import GeneralInterface

from parallelformers_ng.live_code.functions import functions_in, names_in, words_in
from parallelformers_ng.live_code.holders import Tables
from parallelformers_ng.live_code.reach import STEP, Slot, package_named_in, reach
from parallelformers_ng.live_code.replaced import PLAIN_LAYERS, is_torch_function_put_there, replaced_modules
from parallelformers_ng.origins import KNOWN, is_known

_FAMILIES = "transformers.models."
# Attributes that torch, accelerate and this package add to modules.
_OF_ALL_MODULES = {*vars(nn.Module()), "_old_forward", "_hf_hook", "_parallelformers_ng"}
_DATA = (dict, int, float, str, nn.Module, torch.Tensor, type(None), tuple)


def foreign_modules(model: nn.Module) -> dict[str, str]:
    """Path of each module whose forward runs foreign code → description of that code.

    Foreign code is a class of the program, or a function that the program replaced: on the class, on the module, or in
    a global variable that the code names. Hooks of accelerate, which replace `forward` on modules, are not foreign.
    """
    modules = dict(model.named_modules())
    of_classes = {cls: foreign_class(cls) for cls in set(map(type, modules.values()))}
    reasons = {path: _foreign_on_module(each) or of_classes[type(each)] for path, each in modules.items()}
    return {path: reason for path, reason in reasons.items() if reason} | replaced_modules(model, modules)


def foreign_layer(module: nn.Module) -> str:
    """Why a layer may not compute the plain product or look-up of its weight; "" if there is no reason.

    The forward of the layer must be torch's, or that of a class in `transformers.models`, and must use the layer's own
    parameters.
    """
    reason = _foreign_on_module(module) or foreign_class(type(module))
    if reason or type(module).__module__.startswith(_FAMILIES):
        return reason
    if parametrize.is_parametrized(module):
        return "its weight is parametrized"
    for hook in module._forward_pre_hooks.values():  # torch's pruning and weight norms compute the weight in such hooks
        if type(hook).__module__.startswith("torch.nn.utils"):
            return f"a hook ({type(hook).__name__}) computes its weight before each call"
    base: type | None = next((kind for kind in PLAIN_LAYERS if isinstance(module, kind)), None)
    if base is None:
        return ""
    if type(module).forward is not base.forward:  # type: ignore[attr-defined]
        return f"{type(module).__name__} defines its own forward"
    if further := set(module._parameters) - {"weight", "bias"}:
        return f"it has further parameters ({', '.join(sorted(further))})"
    return ""


def tensor_of_own_class(model: nn.Module) -> tuple[str, str]:
    """Name and class name of the first parameter or buffer whose class, of the program, overrides torch functions."""
    overriding = {"__torch_function__", "__torch_dispatch__"}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(overriding & vars(base).keys() and not is_known(base) for base in type(tensor).__mro__):
            return name, type(tensor).__name__
    return "", ""


def names_of(module: nn.Module) -> set[str]:
    """Names that occur in the program's code on a module and on its class."""
    return names_of_class(type(module), vars(module).get("forward"))


def names_of_class(cls: type, *functions: Any) -> set[str]:
    """Names that occur in the program's code on a class and its bases, and in further functions."""
    values = (*functions, *(value for base in cls.__mro__ for value in vars(base).values()))
    return {name for function in _functions_of_program(values) for name in names_in(function.__code__)}


def words_of_program(values: Iterable[Any]) -> set[str]:
    """Names and strings in the program's functions among some values; `getattr` takes names as strings."""
    return {word for function in _functions_of_program(values) for word in words_in(function.__code__)}


def _functions_of_program(values: Iterable[Any]) -> Iterator[types.FunctionType]:
    return (each for value in values for each in functions_in(value) if not _is_of_library(each))


def is_stock(slot: Slot) -> bool:
    """Whether the value of a slot is a library's code, judged by the modules of its functions."""
    value = slot.value
    if isinstance(value, type):
        return is_known(value)
    functions = slot.functions
    if not functions:
        return not callable(value) or is_known(type(value))
    if not all(map(_is_of_library, functions)):
        return False
    if isinstance(slot.holder, type) and slot.key in STEP:  # a method of another class does not count as the library's
        names = {base.__qualname__ for base in slot.holder.__mro__}
        owners = {f.__qualname__.rpartition(".")[0] for f in functions if f.__name__ == slot.key}
        return bool(owners & names) or all(not owner or "<locals>" in owner for owner in owners)
    return True


def is_of_program(place: str) -> bool:
    return package_named_in(place) not in KNOWN


def _is_of_library(function: types.FunctionType) -> bool:
    return is_known(function) and not function.__code__.co_filename.startswith("<ipython")


def is_code_of_program(value: Any) -> bool:
    return not all(map(_is_of_library, functions_in(value)))


def functions_of(module: nn.Module) -> dict[str, Any]:
    """Functions of the program in attributes of a module object, by name of the attribute."""
    program_functions = {}
    for name, value in vars(module).items():
        if name in _OF_ALL_MODULES or isinstance(value, _DATA):
            continue
        if name == "forward":
            value = _without_accelerate(module, value)
            functions, own = set(functions_in(value)), set(functions_in(type(module).forward))
            if value is not None and not (functions and functions <= own):
                program_functions[name] = value
        elif not callable(value) or isinstance(value, type):
            continue
        elif is_code_of_program(value) or is_torch_function_put_there(module, value):
            program_functions[name] = value
    return program_functions


def _foreign_on_module(module: nn.Module) -> str:
    name = next(iter(functions_of(module)), "")
    return "its forward was replaced" if name == "forward" else f"its {name} is the program's" if name else ""


def _without_accelerate(module: nn.Module, forward: Any) -> Any:
    """`forward`, or the forward that accelerate's hook calls; None if that is the method of the class."""
    if "_hf_hook" not in vars(module):
        return forward
    before = vars(module).get("_old_forward")
    function = getattr(before, "__func__", before)
    return None if function is type(module).forward else before


# Cache of `foreign_class`: class → the values on which the answer depends, and the answer.
_OF_CLASS: weakref.WeakKeyDictionary[type, tuple[Tables, str]] = weakref.WeakKeyDictionary()


def foreign_class(cls: type) -> str:
    """Description of the foreign code of a class; "" if the class has none.

    The answer is cached until the program replaces a value that decided the answer, or adds a name beside one.
    """
    known = _OF_CLASS.get(cls)
    if known is not None and all(table.holds() for table in known[0].values()):
        return known[1]
    slots = [slot for slot in reach([cls]).values() if slot.of_step]
    reason = next((f"{slot.place.partition(':')[2]} is not the library's" for slot in slots if not is_stock(slot)), "")
    if not is_known(cls) and type(cls) is type and not _only_inherits(cls):
        reason = reason or f"{cls.__qualname__} is a class of the program"
    decided = Tables()
    for slot in slots:
        decided.of(slot.holder, slot.key).hold({slot.key: slot.value})
        if isinstance(slot.holder, GeneralInterface):
            decided.of(slot.holder._local_mapping).hold({})
    decided.of(torch.Tensor).hold({})  # a new name may be a method that hides an inherited one
    _OF_CLASS[cls] = decided, reason
    return reason


def _only_inherits(cls: type) -> bool:
    """Whether a class of the program defines no method except `__init__`, so that library bases do all work."""
    own = [base for base in cls.__mro__ if not is_known(base)]
    return not any(callable(value) and name != "__init__" for base in own for name, value in vars(base).items())
