"""Reads the formats of bitsandbytes: 8-bit integers with the largest absolute weight of each row, and 4-bit codes with
the largest absolute weight of each block. A block may continue from one row to the next."""

from __future__ import annotations

import json

import torch

from parallelformers_ng.checkpoint.encoded import Decoded
from parallelformers_ng.checkpoint.formats.numbers import Flat, Scaled, Unpacked
from parallelformers_ng.checkpoint.formats.stored_tensors import FLOATS, StoredTensors
from parallelformers_ng.checkpoint.lazy import applied, turned
from parallelformers_ng.checkpoint.nodes import Node
from parallelformers_ng.checkpoint.reading import read
from parallelformers_ng.sharding.encoding import Encoding

_STATE = ".quant_state.bitsandbytes__"
# bitsandbytes can store 4-bit codes in tensors of these data types; only the bytes have a meaning.
_STORAGE = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)


def bitsandbytes(stored: StoredTensors) -> dict[str, Node]:
    """Return an expression for each weight in bitsandbytes' 8-bit and 4-bit formats, by the name of the weight.

    The function removes the stored tensors of these weights from `stored`. An 8-bit weight is its integer times
    `SCB` / 127. The scales of a 4-bit weight, `weight.absmax`, may be quantized too (`nested_absmax`). Source of the
    formats: https://github.com/bitsandbytes-foundation/bitsandbytes.
    """
    weights: dict[str, Node] = {}
    for path in stored.ending_with(".SCB"):
        weights[f"{path}.weight"] = _in_8_bits(stored, path)
    for kind in ("nf4", "fp4"):
        for name in stored.ending_with(_STATE + kind):
            weights[name] = _in_4_bits(stored, name, kind)
    stored.refuse_without_scales((torch.int8, torch.uint8), "SCB or .absmax")
    stored.refuse_left([".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".weight_format"])
    return weights


def _in_8_bits(stored: StoredTensors, path: str) -> Node:
    name = f"{path}.weight"
    values = stored.take(name, f"{path}.SCB", (torch.int8,), (None, None))
    largest = stored.take(f"{path}.SCB", name, FLOATS, values.shape[:1])
    layout = stored.maybe(f"{path}.weight_format", (torch.uint8,), ())
    if layout is not None and (number := int(read(layout, {}))) != 0:
        raise stored.unread(f"stores {name} in a layout for GPU kernels (weight_format {number}, not 0)")
    scales = applied(largest, lambda tensor: tensor.to(torch.float32).unsqueeze(1) / 127)
    weight = Decoded(values.shape, stored.dtype, Encoding("int8", -1, values.shape[1]), (values, scales))
    return turned(weight) if name in stored.transposed else weight


def _in_4_bits(stored: StoredTensors, name: str, kind: str) -> Node:
    key, nested = f"{name}{_STATE}{kind}", None
    text = bytes(read(stored.take(key, name, (torch.uint8,), (None,)), {}).tolist())
    try:
        description = json.loads(text)
        shape, block = tuple(map(int, description["shape"])), int(description["blocksize"])
        if "nested_blocksize" in description:
            nested = int(description["nested_blocksize"]), float(description["nested_offset"])
    except (KeyError, TypeError, ValueError) as error:
        raise stored.damaged(f"{key} is {text!r}, which has no valid {error}") from error
    if len(shape) != 2 or block < 1 or description.get("quant_type") != kind or (nested and nested[0] < 1):
        raise stored.damaged(f"{key} is {text!r}, which is invalid")
    count = shape[0] * shape[1]
    words = applied(stored.take(name, key, _STORAGE, (None, 1)), lambda tensor: tensor.flatten().view(torch.uint8))
    if words.shape[0] != -(-count // 2):
        raise stored.damaged(f"{name} has {words.shape[0]} bytes; {list(shape)} in 4 bits needs {-(-count // 2)} bytes")
    blocks = -(-count // block)
    if nested is None:
        scales = stored.take(f"{name}.absmax", name, FLOATS, (blocks,))
    else:
        codes = stored.take(f"{name}.absmax", name, (torch.uint8,), (blocks,))
        table = _table(stored, f"{name}.nested_quant_map", name, 256)
        large = stored.take(f"{name}.nested_absmax", name, FLOATS, (-(-blocks // nested[0]),))
        levels = Unpacked((blocks,), torch.float32, codes, 8, 0, (0,), table)
        scales = Scaled((blocks,), torch.float32, levels, large, (nested[0],), offset=nested[1])
    table = _table(stored, f"{name}.quant_map", name, 16)
    numbers = Unpacked((count,), torch.float32, words, 4, 0, (1, 0), table)
    stored.reasons[name] = f"it is stored as {kind} codes"
    weight = Flat(shape, stored.dtype, Scaled((count,), torch.float32, numbers, scales, (block,)))
    return turned(weight) if name in stored.transposed else weight


def _table(stored: StoredTensors, key: str, name: str, size: int) -> torch.Tensor:
    return read(stored.take(key, name, FLOATS, (size,)), {}).float().clone()
