"""Pickles for objects that callers hand to their own workers, with tensors and handles left outside as references.

Nothing here reads bytes that were not signed with the group's key; the decoder checks that first.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from parallelformers_ng.runtime.leaves import FileDescriptor

if TYPE_CHECKING:
    from parallelformers_ng.runtime.encoder import Encoder


class ReferencePickler(cloudpickle.Pickler):
    """Classes of `__main__` and notebooks go by value; tensors go beside the pickle, not through it."""

    def __init__(self, buffer: io.BytesIO, encoder: Encoder) -> None:
        super().__init__(buffer, protocol=5)
        self._encoder = encoder

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            return self._encoder.node(obj) if self._encoder.is_portable_tensor(obj) else None
        if type(obj) is FileDescriptor:
            return self._encoder.node(obj)
        stand_in = self._encoder.substitute(obj)
        return None if stand_in is obj else self._encoder.node(stand_in)


class ReferenceUnpickler(pickle.Unpickler):
    """The counterpart; `resolve` turns the JSON form of a reference back into its value."""

    def __init__(self, data: bytes, resolve: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)
