"""Pickles for objects that callers hand to their own workers, with tensors and handles left outside as references.

Nothing here reads bytes that were not signed with the group's key; the decoder checks that first.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch


def _generator(device: str, state: bytes) -> torch.Generator:
    made = torch.Generator(device)
    made.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return made


def _reduce_generator(generator: torch.Generator) -> tuple[Any, ...]:
    """Its state is a tensor of the host, wherever the tensors of the message go."""
    return _generator, (str(generator.device), generator.get_state().numpy().tobytes())


_reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _reduce_code_with_file(code: types.CodeType) -> tuple[Any, ...]:
    """With the name of its file, which cloudpickle leaves out: tracebacks of ranks show its lines."""
    make, parts = _reduce_code(code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)


class ReferencePickler(cloudpickle.Pickler):
    """Classes of `__main__` and notebooks go by value; tensors go beside the pickle, not through it.

    Args:
        reference: the JSON form of a reference to an object that goes beside the pickle, None for one that goes
            through it.
    """

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
        {torch.Generator: _reduce_generator, types.CodeType: _reduce_code_with_file}
    )

    def __init__(self, buffer: io.BytesIO, reference: Callable[[Any], Any]) -> None:
        super().__init__(buffer, protocol=5)
        self.persistent_id = reference


class ReferenceUnpickler(pickle.Unpickler):
    """The counterpart; `resolve` turns the JSON form of a reference back into its value."""

    def __init__(self, data: bytes, resolve: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)
