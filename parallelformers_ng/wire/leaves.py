"""What the encoder and the decoder of messages must agree on: the format, special leaves and limits.

The format carries Python values without pickle, and tensors without copies. A message is a JSON tree, the bytes of its
tensors, and open files; that of a single str is the string alone. In the tree, None, bool, float, str and 64-bit int
stand for themselves; everything else is an array whose first item is a tag, as in:

    ["l", 1, 2]                          the list [1, 2]           ["t", …] tuple   ["s", …] set   ["d", k, v, …] dict
    ["T", 0]                             tensor 0 of the table [[dtype, shape, offset], …] that follows the tree
    ["dc", "pkg.mod:Name", mac, […], …]  a dataclass or ModelOutput: the fields that are not at their defaults
    ["p", mac, "…"]                      a pickle, for objects that callers hand over; read only if the MAC is right
    ["fd", 0]                            an open file              ["h", kind, payload]  an object that stays behind

A byte string of more than 1 KiB is a uint8 tensor of the table, so headers stay small.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

MAX_DEPTH = 100  # containers within containers
MAX_HEADER_BYTES = 64 << 20
MAX_TENSOR_BYTES = 1 << 42
MAX_DESCRIPTORS = 253  # the kernel's SCM_MAX_FD
MAX_INTEGER_BITS = 1 << 16
MAX_DIMENSIONS = 64
INLINE_BYTES = 1024  # longer byte strings and pickles travel with the tensors, not in the header
ALIGNMENT = 64  # bytes; every tensor of a message starts on a cache line

_DTYPE_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
TENSOR_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TENSOR_DTYPES.items()}
ALL_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


@dataclass(frozen=True, slots=True)
class FileDescriptor:
    """A leaf that carries an open file to the other process.

    The sender keeps its own descriptor; the receiver gets a new one, owns it, and closes it.

    Args:
        fd: a descriptor of this process.
    """

    fd: int

    def close(self) -> None:
        """Close the descriptor in this process."""
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Handle:
    """A leaf that stands for an object which stays in the process that sent it.

    Args:
        kind: what it stands for, for example `"cache"`.
        payload: any encodable value that lets the owner find the object again.
    """

    kind: str
    payload: Any = None


def aligned(size: int) -> int:
    """`size` bytes, rounded up to the alignment of tensors in a message."""
    return -(-size // ALIGNMENT) * ALIGNMENT
