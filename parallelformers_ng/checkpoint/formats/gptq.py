"""Reads the formats of GPTQ and AWQ: tensors `qweight`, `qzeros` and `scales` per layer, with the inputs first.

Several integers are packed in each word of 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallelformers_ng.checkpoint.formats.numbers import Blocks, Unpacked, in_order, levels
from parallelformers_ng.checkpoint.formats.stored_tensors import FLOATS, INTEGERS, StoredTensors
from parallelformers_ng.checkpoint.lazy import turned
from parallelformers_ng.checkpoint.nodes import Node

_TURNS = (0, 4, 1, 5, 2, 6, 3, 7)  # AWQ packs eight consecutive outputs into a 32-bit word at these positions


def gptq(stored: StoredTensors) -> dict[str, Node]:
    """Return an expression for each GPTQ weight, by name, and remove the stored tensors of the weights from `stored`.

    Integers are packed along the inputs, and zero points along the outputs. `g_idx` has the group number of each input.
    Except in format gptq_v2, a stored zero point is the real zero point minus 1. Source of the formats:
    https://github.com/ModelCloud/GPTQModel.
    """
    setting = stored.quantization.get
    kind = setting("checkpoint_format") or setting("format") or "gptq"
    if kind not in ("gptq", "gptq_v2") or setting("is_marlin_format") or setting("pack_dtype", "int32") != "int32":
        raise stored.unread(f"has GPTQ's format {kind}; only gptq and gptq_v2 with int32 words can be read")
    if setting("dynamic"):
        raise stored.unread("has different settings for some layers (dynamic)")
    bits = _bits(stored, (2, 4, 8))
    return _weights(stored, bits, 0, in_order(bits), points_of=levels(bits).roll(-1 if kind == "gptq" else 0))


def awq(stored: StoredTensors) -> dict[str, Node]:
    """Return an expression for each AWQ weight in AutoAWQ's gemm format, by name, and remove its tensors from `stored`.

    Integers and zero points are packed along the outputs, eight in a 32-bit word, in the order of `_TURNS`. Source of
    the format: https://github.com/casper-hansen/AutoAWQ.
    """
    kind = str(stored.quantization.get("version") or stored.quantization.get("format") or "gemm").lower()
    if kind != "gemm":
        raise stored.unread(f"has AWQ's format {kind}; only gemm can be read")
    bits = _bits(stored, (4,))
    return _weights(stored, bits, 1, _TURNS, levels(bits))


def _weights(stored: StoredTensors, bits: int, dim: int, places: tuple[int, ...], points_of: Tensor) -> dict[str, Node]:
    """Return an expression for each weight, by name, and remove the stored tensors of the weights from `stored`.

    Args:
        dim: dimension along which integers are packed into words of 32 bits: 0 for the inputs, 1 for the outputs. Zero
            points are always packed along the outputs.
        places: position in a word of each consecutive integer.
        points_of: table from a stored code to the zero point.
    """
    weights = {}
    for path in stored.ending_with(".qweight"):
        name = f"{path}.weight"
        if name in stored.state:
            raise stored.damaged(f"it has both {name} and {path}.qweight")
        words = stored.take(f"{path}.qweight", name, (torch.int32,), (None, None))
        zeros = stored.take(f"{path}.qzeros", name, (torch.int32,), (None, None))
        scales = stored.take(f"{path}.scales", name, FLOATS, (None, None))
        shape = tuple(size * len(places) if at == dim else size for at, size in enumerate(words.shape))
        size = _group(stored, shape[0])
        blocks: Blocks = size
        stored.check(f"{path}.scales", scales, (-(-shape[0] // size), shape[1]))
        stored.check(f"{path}.qzeros", zeros, (scales.shape[0], -(-shape[1] // len(places))))
        order = stored.maybe(f"{path}.g_idx", INTEGERS, shape[:1])
        if order is not None:
            groups = stored.groups_of(f"{path}.g_idx", order, scales.shape[0])
            if not torch.equal(groups, torch.arange(shape[0]) // size):
                blocks = groups
        numbers = Unpacked(shape, torch.int8, words, bits, dim, places, levels(bits))
        points = Unpacked(scales.shape, torch.int8, zeros, bits, 1, places, points_of)
        weight = stored.scaled(name, numbers, scales, (blocks, 1), points, -2, bits)
        # The stored shape is [inputs, outputs]. `Linear` needs [outputs, inputs]; `Conv1D` needs the stored shape.
        weights[name] = weight if name in stored.transposed else turned(weight)
    stored.refuse_left([".qzeros", ".scales", ".g_idx"])
    return weights


def _bits(stored: StoredTensors, known: tuple[int, ...]) -> int:
    bits = stored.quantization.get("bits", stored.quantization.get("w_bit"))
    if bits not in known:
        raise stored.unread(f"has bits={bits}; only {', '.join(map(str, known))} can be read")
    return bits


def _group(stored: StoredTensors, inputs: int) -> int:
    """Return the group size (inputs that share a scale) of the configuration; a value of -1 means all `inputs`."""
    size = stored.quantization.get("group_size", stored.quantization.get("q_group_size", 128))
    if not isinstance(size, int) or size < -1 or size == 0:
        raise stored.damaged(f"group_size in its configuration is {size}; it must be at least 1, or -1 for all inputs")
    return inputs if size == -1 else size
