"""Triton's interpreter for the kernels: they run on CPU, program after program, and their loads and stores are counted.

The interpreter of Triton 3.9 has three faults with bfloat16, which it keeps as integers: it truncates a number that
becomes bfloat16, it may lose a carry when it rounds one, and its products multiply the integers. `interpret` repairs
them. Without the repairs the tests of bfloat16 fail.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from parallelformers_ng.kernels import triton as kernels

_convert_float = interpreter._convert_float
_builder = interpreter.InterpreterBuilder
_create_dot, _masked_load, _masked_store = (
    getattr(_builder, name) for name in ("create_dot", "create_masked_load", "create_masked_store")
)


def interpret() -> None:
    """Have the interpreter run the kernels of this process, until it ends. Idempotent."""
    triton.knobs.propagate_env = False  # processes that this one starts compile their kernels
    triton.knobs.runtime.interpret = True
    names = [module.name for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}.")]
    for module in (tl, tl.core, tl.standard, tl.math, *map(importlib.import_module, names)):
        _replace_functions(module)
    interpreter._convert_float = _converted
    _builder.create_dot = _product
    _builder.create_masked_load, _builder.create_masked_store = _counted_load, _counted_store


def _replace_functions(module: ModuleType) -> None:
    """Replace compiled functions: they were decorated when their module was imported, maybe by another test."""
    for name, value in list(vars(module).items()):
        if isinstance(value, JITFunction):
            setattr(module, name, _interpreted(value))


_functions: dict[Any, Any] = {}


def _interpreted(function: JITFunction[Any]) -> Any:
    if function.fn not in _functions:
        _functions[function.fn] = interpreter.InterpretedFunction(function.fn)
    return _functions[function.fn]


def _converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert float32 to bfloat16 as cards do: to the nearest number, ties to even."""
    if source == tl.float32 and target == tl.bfloat16:
        numbers = torch.from_numpy(np.array(data, dtype=np.float32, ndmin=1)).bfloat16()
        return numbers.view(torch.int16).numpy().view(np.uint16).reshape(np.shape(data))
    return _convert_float(data, source, target, rounding)


def _product(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    return _create_dot(self, *(_widened(self, each) for each in (a, b)), d, *options)


def _widened(builder: Any, handle: Any) -> Any:
    if handle.dtype.scalar == tl.bfloat16:
        return builder.cast_impl(handle, tl.float32)
    return handle


class Traffic:
    """Bytes that kernels load and store.

    Attributes:
        loaded, stored: an entry for each access: the first and the last address, and the bytes.
    """

    def __init__(self) -> None:
        self.loaded: list[tuple[int, int, int]] = []
        self.stored: list[tuple[int, int, int]] = []

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Return the bytes loaded of a tensor's memory and stored to it."""
        start = tensor.untyped_storage().data_ptr()
        end = start + tensor.untyped_storage().nbytes()
        return sum(size for first, _, size in (*self.loaded, *self.stored) if start <= first < end)

    def total(self) -> int:
        """Return all bytes."""
        return sum(size for *_, size in (*self.loaded, *self.stored))


_traffic: list[Traffic] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """Yield the traffic of the kernels that run within it."""
    _traffic.append(Traffic())
    try:
        yield _traffic[-1]
    finally:
        _traffic.pop()


def _counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
    for traffic in _traffic:
        _note(traffic.loaded, pointers, mask)
    return _masked_load(self, pointers, mask, *rest)


def _counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    for traffic in _traffic:
        _note(traffic.stored, pointers, mask)
    return _masked_store(self, pointers, value, mask, *rest)


def _note(accesses: list[tuple[int, int, int]], pointers: Any, mask: Any) -> None:
    addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
    if addresses.size:
        size = addresses.size * ((pointers.get_element_ty().primitive_bitwidth + 7) // 8)
        accesses.append((int(addresses.min()), int(addresses.max()), size))
