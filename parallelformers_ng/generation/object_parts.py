"""Reads and writes the contents of the mutable objects that a program gives to a call."""

from __future__ import annotations

import argparse
import array
import collections
import copyreg
import dis
import enum
import functools
import io
import pickle
import random
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LogitsProcessor, StoppingCriteria

from parallelformers_ng.errors import NotPortableError
from parallelformers_ng.wire.message import TENSOR_CLASSES

LIBRARIES = frozenset({"parallelformers_ng", "transformers", "torch", "tokenizers", "numpy"}) | sys.stdlib_module_names
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range})
_FOLLOWED = (
    LogitsProcessor, StoppingCriteria, types.SimpleNamespace, argparse.Namespace, collections.UserDict,
    collections.UserList,
)  # fmt: skip
_CONTAINERS = (list, dict, set, collections.deque)
_WITH_STATE = (random.Random, io.StringIO, io.BytesIO, np.random.BitGenerator, np.random.RandomState)
"""Classes of the standard library and numpy with a `__setstate__` that works in place."""
_BETWEEN_THREADS = (threading.Event, threading.Condition, threading.Semaphore)
CODE = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType, nn.Module)
_SMALL_TENSOR = 1 << 16
REMOVED = object()


@dataclass(eq=False)
class Names:
    """Variables of a module that code of the program reads or assigns.

    Attributes:
        anchor: the module, or a function with the same globals: ranks have no `__main__` of the program.
        names: names of the variables, defined or not.
    """

    anchor: types.FunctionType | types.ModuleType
    names: set[str] = field(default_factory=set)

    @property
    def namespace(self) -> dict[str, Any]:
        return vars(self.anchor) if isinstance(self.anchor, types.ModuleType) else self.anchor.__globals__


Place = type | types.FunctionType | Names
"""A part that ranks may have by import, so that its values are sent separately."""


@functools.cache
def is_own_code(module: str) -> bool:
    """Return whether a module is part of the program: neither of the standard library nor in site-packages."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] not in LIBRARIES and "-packages/" not in file


def is_part(obj: Any, with_modules: bool) -> bool:
    """Return whether changes inside an object are followed.

    Args:
        obj: the object.
        with_modules: whether modules of torch are followed, too.
    """
    if isinstance(obj, (*_CONTAINERS, bytearray, array.array, types.CellType, Names, torch.Generator)):
        return True
    if isinstance(obj, torch.Tensor):
        is_exact = type(obj) in TENSOR_CLASSES or type(obj) is nn.Parameter
        return is_exact and obj.layout is torch.strided and obj.device.type != "meta" and not obj.is_quantized
    if isinstance(obj, (types.FunctionType, type)):
        return is_own_code(obj.__module__ or "") and not (isinstance(obj, type) and issubclass(obj, enum.Enum))
    if isinstance(obj, (np.ndarray, *_WITH_STATE)):
        return not isinstance(obj, random.SystemRandom)
    if isinstance(obj, nn.Module):
        return with_modules
    if isinstance(obj, (enum.Enum, *CODE)):
        return False
    return _has_own_attributes(obj)


def _has_own_attributes(obj: Any) -> bool:
    """Return whether an object is of the program's class, or a container or processor; False for tokenizers, …."""
    if isinstance(obj, (*_FOLLOWED, *_CONTAINERS, nn.Module)):
        return True
    is_of_library = (type(obj).__module__ or "").partition(".")[0] in LIBRARIES
    return not is_of_library and (hasattr(obj, "__dict__") or bool(copyreg._slotnames(type(obj))))  # type: ignore[attr-defined]


def attributes_of(part: Any) -> dict[str, Any]:
    """Return the attributes of a part that are followed: name → value."""
    if isinstance(part, Names):
        space = part.namespace
        return {name: space[name] for name in sorted(part.names) if name in space and not isinstance(space[name], CODE)}
    if isinstance(part, type):
        return {
            name: value
            for name, value in [*vars(part).items()]
            if not name.startswith("__") and not hasattr(type(value), "__get__") and not isinstance(value, CODE)
        }
    if isinstance(part, types.FunctionType):
        return {**vars(part), "__defaults__": part.__defaults__, "__kwdefaults__": part.__kwdefaults__}
    if not _has_own_attributes(part):
        return {}
    names = copyreg._slotnames(type(part))  # type: ignore[attr-defined]  # as pickle finds them
    slots = {name: getattr(part, name) for name in names if hasattr(part, name)}
    return {**getattr(part, "__dict__", {}), **slots}


def put_attribute(part: Any, name: str, value: Any) -> None:
    """Set an attribute of a part without the program's `__setattr__`, or delete the attribute if `value` is REMOVED."""
    if isinstance(part, (type, types.FunctionType)):
        attributes: Any = None
    else:
        attributes = part.namespace if isinstance(part, Names) else getattr(part, "__dict__", None)
    if attributes is not None and (isinstance(part, Names) or name not in copyreg._slotnames(type(part))):  # type: ignore[attr-defined]
        if value is REMOVED:
            attributes.pop(name, None)
        else:
            attributes[name] = value
        return
    setter, deleter = (setattr, delattr) if attributes is None and isinstance(part, (type, types.FunctionType)) else (
        object.__setattr__, object.__delattr__
    )  # fmt: skip
    if value is not REMOVED:
        setter(part, name, value)
    elif hasattr(part, name):
        deleter(part, name)


def items_of(part: Any) -> Any:
    """Return the present items of a part: a dictionary, a list, or another value that equals itself until the next
    change."""
    if isinstance(part, dict):
        return dict(part.items())
    if isinstance(part, (list, collections.deque)):
        return list(part)
    if isinstance(part, types.CellType):
        try:
            return [part.cell_contents]
        except ValueError:  # the cell is empty
            return []
    if isinstance(part, set):
        return set(part)
    if isinstance(part, torch.Tensor):
        if part.is_inference() or (part.device.type == "cpu" and part.nbytes <= _SMALL_TENSOR):
            flat = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return tuple(part.shape), flat.numpy().tobytes()
        return tuple(part.shape), part._version, part.data_ptr()
    if isinstance(part, np.ndarray):
        return part.shape, pickle.dumps(part) if part.dtype.hasobject else part.tobytes()
    if isinstance(part, array.array):
        return part.typecode, part.tobytes()
    if isinstance(part, bytearray):
        return bytes(part)
    if isinstance(part, torch.Generator):
        return part.get_state().numpy().tobytes()
    if isinstance(part, _WITH_STATE):
        return pickle.dumps(state_of(part))
    return None


def state_of(part: Any) -> Any:
    """Return the items of a part in the form that `put_items` takes."""
    if isinstance(part, torch.Tensor):
        return part.detach().clone()
    if isinstance(part, torch.Generator):
        return part.get_state()
    return (
        part.__reduce_ex__(4)[2]
        if isinstance(part, _WITH_STATE)
        else part.copy()
        if isinstance(part, np.ndarray)
        else items_of(part)
    )


def put_items(part: Any, items: Any) -> None:
    """Write items to a part in place."""
    if isinstance(part, (list, bytearray)):
        part[:] = items
    elif isinstance(part, (collections.deque, set)):
        part.clear()
        (part.extend if isinstance(part, collections.deque) else part.update)(items)
    elif isinstance(part, types.CellType):
        if items:
            part.cell_contents = items[0]
        else:
            del part.cell_contents
    elif isinstance(part, torch.Tensor):
        if part.shape == items.shape:
            with torch.inference_mode():
                part.copy_(items)
        else:
            part.data = items
    elif isinstance(part, np.ndarray):
        if part.shape != items.shape:
            part.resize(items.shape, refcheck=False)
        part[...] = items
    elif isinstance(part, array.array):
        del part[:]
        part.frombytes(items[1])
    elif isinstance(part, torch.Generator):
        part.set_state(items)
    else:
        part.__setstate__(items)


def put_item(part: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an item of a dictionary without the program's `__setitem__`, or delete the item if `value` is REMOVED."""
    kind: Any = collections.OrderedDict if isinstance(part, collections.OrderedDict) else dict
    if value is not REMOVED:
        kind.__setitem__(part, key, value)
    elif key in part:
        kind.__delitem__(part, key)


def inner(obj: Any) -> Iterator[Any]:
    """Yield the values that an object contains, in the same order in every process."""
    if isinstance(obj, types.MethodType):
        yield from (obj.__func__, obj.__self__)
    elif isinstance(obj, functools.partial):
        yield from (obj.func, *obj.args, *obj.keywords.values())
    elif isinstance(obj, tuple):
        yield from obj
    elif isinstance(obj, types.FunctionType):
        yield from obj.__closure__ or ()
    elif isinstance(obj, np.random.Generator):
        yield obj.bit_generator
    elif isinstance(getattr(obj, "__wrapped__", None), types.FunctionType):
        yield obj.__wrapped__
    elif isinstance(obj, type):
        for _, value in sorted(vars(obj).items()):
            yield from _functions_in(value)
    elif isinstance(obj, dict):
        for key, value in obj.items():
            yield from (key, value)
    elif isinstance(obj, (list, collections.deque, types.CellType)):
        yield from items_of(obj)


def _functions_in(value: Any) -> Iterator[Any]:
    for name in ("__func__", "fget", "fset", "func"):
        value = getattr(value, name, None) or value
    if isinstance(value, types.FunctionType):
        yield value


@functools.lru_cache(4096)
def names_of(code: types.CodeType) -> dict[str, set[str]]:
    """Return the names of the global variables in code and in functions within the code: name → names of attributes
    that the code looks up in the variable."""
    names: dict[str, set[str]] = {}
    variable = None
    for instruction in dis.get_instructions(code):
        if instruction.opname.endswith("_GLOBAL"):
            variable = instruction.argval
            names.setdefault(variable, set())
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR") and variable is not None:
            names[variable].add(instruction.argval)
            variable = variable if instruction.opname.startswith("STORE") else None
        elif instruction.opname != "COPY":
            variable = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for name, attributes in names_of(constant).items():
                names.setdefault(name, set()).update(attributes)
    return names


def check_between_threads(owner: Any, name: str, value: Any) -> None:
    """Raise NotPortableError for a value of a module or class that other threads signal through, such as an Event."""
    if isinstance(value, _BETWEEN_THREADS) or type(value).__module__ in ("queue", "_queue"):
        where = getattr(owner, "__qualname__", "") or "a module"
        raise NotPortableError(f"{name} of {where} (a {type(value).__qualname__}) cannot be shared with the workers")
