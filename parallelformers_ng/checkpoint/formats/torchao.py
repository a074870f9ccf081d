"""Reads the format of torchao: each weight is stored as several tensors, which the file header describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from parallelformers_ng.checkpoint.formats.stored_tensors import FLOATS, FP8, StoredTensors
from parallelformers_ng.checkpoint.nodes import Node

# Tensor classes of torchao that can be read → data types of their numbers.
_PARTS = {"Int8Tensor": (torch.int8,), "IntxUnpackedToInt8Tensor": (torch.int8,), "Float8Tensor": FP8}
_FEW_BITS = ("int1", "int2", "int3", "int4")


def torchao(stored: StoredTensors) -> dict[str, Node]:
    """Return name → node of the torchao weights, and remove the tensors of the weights from `stored`.

    A weight has the tensors `_weight_qdata` and `_weight_scale`, and may have `_weight_zero_point`. The format is that
    of https://github.com/pytorch/ao.
    """
    weights = {}
    header = stored.header()
    for name in _read(stored, header, "tensor_names"):
        description = _read(stored, header, name)
        kind, data = description["_type"], description.get("_data")
        if kind == "Tensor":
            continue
        path, _, short = name.rpartition(".")
        start = f"{path}._{short}_"
        if kind not in _PARTS:
            raise stored.unread(f"stores {name} as torchao's {kind}; only {', '.join(_PARTS)} can be read")
        if f"{start}act_pre_scale" in stored.state:
            raise stored.unread(f"has {start}act_pre_scale, a scale of activations")
        values = stored.take(f"{start}qdata", name, _PARTS[kind])
        scales = stored.take(f"{start}scale", name, FLOATS)
        has_zeros = "zero_point" in description.get("_tensor_data_names", ())
        zeros = stored.take(f"{start}zero_point", name, (torch.int8, *FLOATS), scales.shape) if has_zeros else None
        blocks = data.get("block_size") if isinstance(data, Mapping) else None
        sizes = [size for size in blocks or () if isinstance(size, int) and size > 0]
        if len(sizes) != len(values.shape) or len(sizes) != len(blocks or ()):
            raise stored.damaged(f"the block_size of {name} {list(values.shape)} is {blocks}, which is invalid")
        weights[name] = stored.scaled(name, values, scales, sizes, zeros, bits=_bits(data))
        stored.drop(f"{start}act_quant_scale", f"{start}act_quant_zero_point")
    stored.refuse_without_scales((*FP8, torch.int8), "_scale")
    stored.refuse_left(["_scale", "_zero_point"])
    return weights


def _bits(data: Mapping[str, Any]) -> int:
    """Return the bits of an integer: 8 if `target_dtype` is absent or not int1 to int4. It is a name, or a mapping with
    that name under `_data`."""
    target = data.get("target_dtype")
    name = str(target.get("_data") if isinstance(target, Mapping) else target).removeprefix("torch.")
    return int(name[3:]) if name in _FEW_BITS else 8


def _read(stored: StoredTensors, header: Mapping[str, str], key: str) -> Any:
    try:
        return json.loads(header[key])
    except (KeyError, ValueError) as error:
        raise stored.damaged(f"the file header has no valid {key!r}: {error!r}") from error
