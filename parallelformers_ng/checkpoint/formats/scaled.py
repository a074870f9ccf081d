"""Reads formats with one scale per block: those of DeepSeek, gpt-oss, compressed-tensors and torchao."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallelformers_ng.checkpoint.formats.numbers import Blocks, Scaled, Unpacked, in_order, levels
from parallelformers_ng.checkpoint.formats.stored_tensors import FLOATS, FP8, INTEGERS, StoredTensors
from parallelformers_ng.checkpoint.lazy import applied, turned
from parallelformers_ng.checkpoint.nodes import Node
from parallelformers_ng.checkpoint.reading import read

_POWERS = torch.float8_e8m0fnu  # this data type holds powers of two: 8 exponent bits, no sign, no mantissa
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_E2M1, -_E2M1])


def fp8(stored: StoredTensors) -> dict[str, Node]:
    """Return an expression for each weight in DeepSeek's format, by name, and remove its tensors from `stored`.

    `weight` has 8-bit floats, and `weight_scale_inv` has one scale per block. Scales of activations are removed, too.
    Source of the format: DeepSeek-V3 (https://huggingface.co/deepseek-ai/DeepSeek-V3).
    """
    block = stored.quantization.get("weight_block_size")
    if block is not None and (len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block)):
        raise stored.damaged(f"weight_block_size in its configuration is {block}; it must be two positive integers")
    weights = {}
    for name in stored.ending_with("_scale_inv"):
        scales = stored.take(f"{name}_scale_inv", name, (*FLOATS, _POWERS))
        values = stored.take(name, f"{name}_scale_inv", FP8)
        one = max(scales.shape, default=1) == 1
        blocks = None if block is None or one else ((1,) * (len(values.shape) - 2) + tuple(block))
        weights[name] = stored.scaled(name, values, scales, blocks)
        stored.drop(f"{name.removesuffix('.weight')}.activation_scale", f"{name}_activation_scale")
    stored.refuse_without_scales(FP8, "_scale_inv")
    return weights


def mxfp4(stored: StoredTensors) -> dict[str, Node]:
    """Return an expression for each weight in gpt-oss's format, by name, and remove its tensors from `stored`.

    `…_blocks` has two 4-bit floats in each byte, and 32 floats in each block. `…_scales` has the exponent of each
    block. The format is MXFP4 of the OCP Microscaling Formats specification, version 1.0.
    """
    weights: dict[str, Node] = {}
    for name in stored.ending_with("_blocks"):
        values = stored.take(f"{name}_blocks", name, (torch.uint8,))
        scales = stored.take(f"{name}_scales", name, (torch.uint8,), values.shape[:-1])
        stored.check(f"{name}_blocks", values, (*values.shape[:-1], 16))
        words = applied(values, lambda tensor: tensor.flatten(-2))
        exponents = applied(scales, lambda tensor: tensor.view(_POWERS))
        dim, shape = len(words.shape) - 1, (*words.shape[:-1], words.shape[-1] * 2)
        codes = Unpacked(shape, torch.float32, words, 4, dim, (0, 1), _E2M1)
        stored.reasons[name] = "it is stored as 4-bit floats"
        weights[name] = turned(Scaled(shape, stored.dtype, codes, exponents, (*(1,) * dim, 32)))
    stored.refuse_left(["_scales"])
    return weights


_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")


def compressed_tensors(stored: StoredTensors) -> dict[str, Node]:
    """Return an expression for each compressed-tensors weight, by name, and remove its stored tensors from `stored`.

    A layer has `weight` (8 bits) or `weight_packed`, `weight_scale`, and perhaps `weight_zero_point` and
    `weight_g_idx`, the group number of each input. Scales of activations are removed, too. Source of the formats:
    https://github.com/vllm-project/compressed-tensors.
    """
    groups = _groups(stored)
    weights = {}
    for path in stored.ending_with(".weight_scale"):
        name = f"{path}.weight"
        if f"{name}_global_scale" in stored.state:
            raise stored.unread(f"has {name}_global_scale")
        scales = stored.take(f"{name}_scale", name, FLOATS)
        if f"{name}_packed" in stored.state:
            values, zeros, bits = _packed(stored, name, groups)
        else:
            bits = 8
            values = stored.take(name, f"{name}_scale", (*FP8, torch.int8))
            zeros = stored.maybe(f"{name}_zero_point", (torch.int8, *FP8))
        order = stored.maybe(f"{name}_g_idx", INTEGERS, values.shape[-1:])
        blocks = _blocks(stored, name, values.shape, scales.shape, groups)
        if order is not None and len(blocks) == 2:
            blocks = (blocks[0], stored.groups_of(f"{name}_g_idx", order, scales.shape[-1]))
        weights[name] = stored.scaled(name, values, scales, blocks, zeros, bits=bits)
    stored.drop(*(name for name in stored.state if name.endswith(_OF_ACTIVATIONS)))
    stored.refuse_without_scales((*FP8, torch.int8), "_scale")
    stored.refuse_left([".weight_packed", ".weight_zero_point", ".weight_g_idx", ".weight_shape"])
    return weights


_OF_ACTIVATIONS = tuple(
    f".{of}_{what}" for of in ("input", "output", "k", "v", "q") for what in ("scale", "zero_point", "global_scale")
)


def _groups(stored: StoredTensors) -> list[Mapping[str, Any]]:
    settings = stored.quantization
    if any((settings.get("transform_config") or {}).get("config_groups") or {}):
        raise stored.unread("has a transform_config, which also transforms activations")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise stored.unread(f"is sparse ({settings['sparsity_config']['format']})")
    groups = list((settings.get("config_groups") or {}).values())
    for group in groups:
        kind = group.get("format") or settings.get("format")
        if kind not in _FORMATS:
            raise stored.unread(f"has compressed-tensors' format {kind}; only {', '.join(_FORMATS)} can be read")
    weights = [group["weights"] for group in groups if isinstance(group.get("weights"), Mapping)]
    if not weights:
        raise stored.damaged("its configuration has no config_groups with settings of weights")
    return weights


def _packed(stored: StoredTensors, name: str, groups: Sequence[Mapping[str, Any]]) -> tuple[Node, Node | None, int]:
    """Return (integers, zero points or None, bits per integer) of a weight that is stored as `weight_packed`.

    A packed code of b bits is the integer plus 2^(b − 1).
    """
    words = stored.take(f"{name}_packed", name, (torch.int32,), (None, None))
    shape = tuple(read(stored.take(f"{name}_shape", name, INTEGERS, (2,)), {}).tolist())
    widths = {int(group.get("num_bits") or 0) for group in groups}
    fitting = [bits for bits in (2, 4, 8) if bits in widths and words.shape == (shape[0], -(-shape[1] * bits // 32))]
    if not fitting:
        if not widths & {2, 4, 8}:
            raise stored.unread(f"packs {name} in {', '.join(map(str, widths))} bits; only 2, 4 or 8 can be read")
        raise stored.damaged(
            f"the shape of {name}_packed is {list(words.shape)}, which does not fit {name}_shape {list(shape)} in"
            f" {sorted(widths)} bits"
        )
    bits = fitting[0]
    values = Unpacked(shape, torch.int8, words, bits, 1, in_order(bits), levels(bits))
    zeros = stored.maybe(f"{name}_zero_point", (torch.int32, torch.int8))
    if zeros is not None and zeros.dtype is torch.int32:
        stored.check(f"{name}_zero_point", zeros, (-(-shape[0] * bits // 32), None))
        zeros = Unpacked((shape[0], zeros.shape[1]), torch.int8, zeros, bits, 0, in_order(bits), levels(bits))
    return values, zeros, bits


def _blocks(
    stored: StoredTensors, name: str, shape: Sequence[int], scales: Sequence[int], groups: Sequence[Mapping[str, Any]]
) -> tuple[Blocks, ...]:
    """Return the block sizes of a weight of shape `shape`: those of the first item of `config_groups` that fit the
    shape of the scales."""
    last, rest = shape[-1], (1,) * (len(shape) - 1)
    for group in groups:
        strategy, size = group.get("strategy"), group.get("group_size")
        if strategy == "block":
            blocks: tuple[int, ...] = (*rest[1:], *group["block_structure"])
        elif strategy == "channel":
            blocks = (*rest, last)
        elif size is not None and size > 0:
            blocks = (*rest, size)
        else:
            blocks = tuple(shape)
        if len(blocks) != len(shape):
            continue
        one = blocks == tuple(shape) and max(scales, default=1) == 1
        if one or [-(-n // block) for n, block in zip(shape, blocks, strict=True)] == list(scales):
            return blocks
    raise stored.damaged(
        f"the shape of the scales of {name} {list(shape)} is {list(scales)}, which fits no group of the configuration"
    )


# Supported tensor classes of torchao → possible data types of their quantized numbers.
_PARTS = {"Int8Tensor": (torch.int8,), "IntxUnpackedToInt8Tensor": (torch.int8,), "Float8Tensor": FP8}


def torchao(stored: StoredTensors) -> dict[str, Node]:
    """Return an expression for each torchao weight, by name, and remove its stored tensors from `stored`.

    A weight has the tensors `_weight_qdata` and `_weight_scale`, and may have `_weight_zero_point`. Source of the
    format: https://github.com/pytorch/ao.
    """
    weights = {}
    header = stored.header()
    for name in _of_header(stored, header, "tensor_names"):
        description = _of_header(stored, header, name)
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
        weights[name] = stored.scaled(name, values, scales, sizes, zeros, bits=_bits_of(data))
        stored.drop(f"{start}act_quant_scale", f"{start}act_quant_zero_point")
    stored.refuse_without_scales((*FP8, torch.int8), "_scale")
    stored.refuse_left(["_scale", "_zero_point"])
    return weights


def _bits_of(data: Mapping[str, Any]) -> int:
    """Return the bits of an integer of a torchao tensor: 1 to 4 if `target_dtype` is int1 to int4, otherwise 8.
    `target_dtype` is the name of a data type, or a mapping with the name under `_data`."""
    target = data.get("target_dtype")
    name = str(target.get("_data") if isinstance(target, Mapping) else target).removeprefix("torch.")
    return int(name[3:]) if name in ("int1", "int2", "int3", "int4") else 8


def _of_header(stored: StoredTensors, header: Mapping[str, str], key: str) -> Any:
    try:
        return json.loads(header[key])
    except (KeyError, ValueError) as error:
        raise stored.damaged(f"the file header has no valid {key!r}: {error!r}") from error
