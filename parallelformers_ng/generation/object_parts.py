"""Reads and writes the contents of mutable objects ("parts") that the user passes to a call."""

from __future__ import annotations

import array
import collections
import collections.abc
import copyreg
import enum
import io
import pickle
import queue
import random
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from parallelformers_ng.errors import NotPortableError
from parallelformers_ng.live_code import object_graph
from parallelformers_ng.live_code.functions import function_behind
from parallelformers_ng.live_code.object_graph import CODE, checksum, children_of
from parallelformers_ng.origins import is_library
from parallelformers_ng.wire.message import TENSOR_CLASSES

_CONTAINERS = (list, dict, set, collections.deque, bytearray, array.array, types.CellType, torch.Generator)
# Classes of the standard library and numpy with a `__setstate__` that works in place.
_WITH_STATE = (random.Random, io.StringIO, io.BytesIO, np.random.BitGenerator, np.random.RandomState)
_BETWEEN_THREADS = (threading.Event, threading.Condition, threading.Semaphore, queue.Queue, queue.SimpleQueue)
_NOT_FOLLOWED = (collections.abc.Iterator, memoryview)
_SMALL_TENSOR = 1 << 16
REMOVED = object()


@dataclass(eq=False)
class Names:
    """Global variables of a module that the user's code reads or assigns.

    Attributes:
        anchor: the module, or for `__main__`, which ranks cannot import, one of its functions.
        names: names of the variables, defined or not.
    """

    anchor: types.FunctionType | types.ModuleType
    names: set[str] = field(default_factory=set)

    @property
    def namespace(self) -> dict[str, Any]:
        return vars(self.anchor) if isinstance(self.anchor, types.ModuleType) else self.anchor.__globals__


# Ranks may import these objects instead of receiving copies, so the values inside them are sent separately.
Place = type | types.FunctionType | Names


def is_part(obj: Any, with_modules: bool) -> bool:
    """Whether changes inside `obj` are copied between caller and workers. `with_modules` includes `nn.Module`s."""
    if isinstance(obj, (*_CONTAINERS, Names)):
        return True
    if isinstance(obj, torch.Tensor):
        is_exact = type(obj) in TENSOR_CLASSES or type(obj) is nn.Parameter
        return is_exact and obj.device.type != "meta" and not obj.is_quantized and not obj.is_mkldnn
    if isinstance(obj, (types.FunctionType, type)):
        return not is_library(obj.__module__ or "") and not (isinstance(obj, type) and issubclass(obj, enum.Enum))
    if isinstance(obj, (np.ndarray, *_WITH_STATE)):
        return not isinstance(obj, random.SystemRandom)
    return with_modules if isinstance(obj, nn.Module) else object_graph.attributes_of(obj) is not None


def attributes_of(part: Any) -> dict[str, Any]:
    """Return a shallow copy of the attributes of an object that the caller and the workers keep equal."""
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
    if isinstance(part, nn.Module):
        return dict(vars(part))
    return dict(object_graph.attributes_of(part) or {})


def inner(part: Any) -> Iterator[Any]:
    """Yield the values inside a mutable object or a tuple, in the same order in every process."""
    if isinstance(part, type):
        functions = (function_behind(value) or value for _, value in sorted(vars(part).items()))
        yield from (each for each in functions if isinstance(each, types.FunctionType))
    elif not isinstance(part, (set, frozenset)):  # the order of a set differs between processes
        yield from children_of(part)


def put_attribute(part: Any, name: str, value: Any) -> None:
    """Set an attribute, or delete it if `value` is REMOVED, without calling a user-defined `__setattr__`."""
    put: Any = object.__setattr__
    delete: Any = object.__delattr__
    if isinstance(part, (type, types.FunctionType)):
        put, delete = setattr, delattr
    elif name not in copyreg._slotnames(type(part)):  # type: ignore[attr-defined]
        put_item(part.namespace if isinstance(part, Names) else vars(part), name, value)
        return
    if value is not REMOVED:
        put(part, name, value)
    elif hasattr(part, name):
        delete(part, name)


def items_of(part: Any) -> Any:
    """Return the items of a container, or for other mutable objects a value that differs after each change."""
    if isinstance(part, torch.Tensor):
        is_sparse = part.layout is not torch.strided
        if part.is_inference() or is_sparse or (part.device.type == "cpu" and part.nbytes <= _SMALL_TENSOR):
            return part.shape, checksum(part)  # some writes leave the version counter (`_version`) as it is
    elif isinstance(part, np.ndarray) and part.dtype.hasobject:
        return part.shape, pickle.dumps(part)
    elif isinstance(part, torch.Generator):
        return part.get_state().numpy().tobytes()
    elif isinstance(part, _WITH_STATE):
        return pickle.dumps(state_of(part))
    return object_graph.snapshot(object_graph.items_of(part))


def state_of(part: Any) -> Any:
    """Return the contents of a mutable object in the form that `put_items` accepts."""
    if isinstance(part, torch.Tensor):
        return part.detach().clone()
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, np.ndarray):
        return part.copy()
    return part.__reduce_ex__(4)[2] if isinstance(part, _WITH_STATE) else items_of(part)


def make_resizable(tensor: torch.Tensor) -> None:
    """Give a tensor, whose memory is that of a message, memory of its own, so that code may resize it."""
    if tensor.layout is torch.strided and not tensor.untyped_storage().resizable():
        tensor.data = tensor.clone()


def put_items(part: Any, items: Any) -> None:
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
    """Set an item of a dict, or delete it if `value` is REMOVED, without calling a user-defined `__setitem__`."""
    kind: Any = collections.OrderedDict if isinstance(part, collections.OrderedDict) else dict
    if value is not REMOVED:
        kind.__setitem__(part, key, value)
    elif key in part:
        kind.__delitem__(part, key)


def check_can_be_followed(value: Any, by_hook: bool) -> None:
    """Raise NotPortableError for a value between threads, and, except of hooks, for a value that a rank changes in ways
    that cannot be repeated here: an iterator of a library, or a view of other memory."""
    if isinstance(value, _BETWEEN_THREADS if by_hook else (*_BETWEEN_THREADS, *_NOT_FOLLOWED)):
        raise NotPortableError(f"a {type(value).__qualname__} cannot be shared with the workers")
