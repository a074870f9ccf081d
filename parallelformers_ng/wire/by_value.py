"""Pickles of objects that callers hand to their own workers: what cannot be imported there goes by value."""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch


def _generator(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _reduce_generator(generator: torch.Generator) -> tuple[Any, ...]:
    """Return the reduced generator; its state is a host tensor, wherever the tensors of the message go."""
    return _generator, (str(generator.device), generator.get_state().numpy().tobytes())


_reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _reduce_code_with_file(code: types.CodeType) -> tuple[Any, ...]:
    """With the name of its file, which cloudpickle leaves out: tracebacks of ranks show its lines."""
    make, parts = _reduce_code(code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)


class ByValuePickler(cloudpickle.Pickler):
    """Classes and functions of `__main__`, of notebooks and of modules that are registered for it go by value."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
        {torch.Generator: _reduce_generator, types.CodeType: _reduce_code_with_file}
    )


class ReferencePickler(ByValuePickler):
    """Leaves some objects outside.

    Args:
        reference: reference to an object that stays outside the pickle; None for one that goes into it.
    """

    def __init__(self, buffer: io.BytesIO, reference: Callable[[Any], Any]) -> None:
        super().__init__(buffer, protocol=5)
        self.persistent_id = reference


class ReferenceUnpickler(pickle.Unpickler):
    """The counterpart.

    Args:
        data: the pickle.
        resolve: turns a reference back into its object.
    """

    def __init__(self, data: bytes, resolve: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)
