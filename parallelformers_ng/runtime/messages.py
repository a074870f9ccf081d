"""The codec of the control channel: Python values without pickle, tensors without copies.

A message is a JSON tree, the bytes of its tensors, and open files. In the tree, None, bool, float, str and 64-bit
int stand for themselves; everything else is an array whose first item is a tag:

    ["l", 1, 2]                          the list [1, 2]           ["t", …] tuple   ["s", …] set   ["d", k, v, …] dict
    ["T", 0]                             tensor 0 of the table [[dtype, shape, offset], …] that follows the tree
    ["dc", "pkg.mod:Name", mac, […], …]  a dataclass or ModelOutput: the fields that are not at their defaults
    ["p", mac, "…"]                      a pickle, for objects that callers hand over; read only if the MAC is right
    ["fd", 0]                            an open file              ["h", kind, payload]  an object that stays behind

A byte string of more than 1 KiB is a uint8 tensor of the table, so headers stay small.
"""

from __future__ import annotations

from parallelformers_ng.runtime.decoder import decode
from parallelformers_ng.runtime.encoder import Encoded, encode
from parallelformers_ng.runtime.leaves import FileDescriptor, Handle

__all__ = ["Encoded", "FileDescriptor", "Handle", "decode", "encode"]
