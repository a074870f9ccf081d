"""8-bit floats of DeepSeek, 4-bit floats of gpt-oss, and what compressed-tensors writes: numbers in blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallelformers_ng.checkpoint.formats.numbers import Blocks, Scaled, Unpacked, in_order
from parallelformers_ng.checkpoint.formats.stored_tensors import FLOATS, FP8, INTEGERS, StoredTensors
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.nodes import Node
from parallelformers_ng.checkpoint.reading import read

_POWERS = torch.float8_e8m0fnu
"""Powers of two: 8 bits of exponent and no other."""
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_E2M1, -_E2M1])


def fp8(stored: StoredTensors) -> dict[str, Node]:
    """DeepSeek's: `weight` in 8-bit floats, `weight_scale_inv` with a scale for each block."""
    said = stored.quantization.get("weight_block_size")
    if said is not None and not (len(said) == 2 and all(isinstance(size, int) and size > 0 for size in said)):
        raise stored.damaged(f"its configuration says weight_block_size is {said}; it takes two numbers, above 0")
    weights = {}
    for name in stored.ending_with("_scale_inv"):
        scales = stored.take(f"{name}_scale_inv", name, (*FLOATS, _POWERS))
        values = stored.take(name, f"{name}_scale_inv", FP8)
        one = max(scales.shape, default=1) == 1
        blocks = None if said is None or one else ((1,) * (len(values.shape) - 2) + tuple(said))
        weights[name] = stored.scaled(name, values, scales, blocks)
        stored.drop(f"{name.removesuffix('.weight')}.activation_scale", f"{name}_activation_scale")
    stored.refuse_without_scales(FP8, "_scale_inv")
    return weights


def mxfp4(stored: StoredTensors) -> dict[str, Node]:
    """gpt-oss's: `…_blocks`, two numbers in a byte and 32 in a block, `…_scales` with the exponent of each."""
    weights: dict[str, Node] = {}
    for name in stored.ending_with("_blocks"):
        values = stored.take(f"{name}_blocks", name, (torch.uint8,))
        scales = stored.take(f"{name}_scales", name, (torch.uint8,), values.shape[:-1])
        stored.check(f"{name}_blocks", values, (*values.shape[:-1], 16))
        words: Any = LazyTensor(values).flatten(-2)
        exponents: Any = LazyTensor(scales).view(_POWERS)
        dim, shape = len(words.shape) - 1, (*words.shape[:-1], words.shape[-1] * 2)
        codes = Unpacked(shape, torch.float32, words.node, 4, dim, (0, 1), _E2M1)
        stored.reasons[name] = "it is 4-bit floats"
        weight: Any = LazyTensor(Scaled(shape, stored.dtype, codes, exponents.node, (*(1,) * dim, 32)))
        weights[name] = weight.transpose(-1, -2).node
    stored.refuse_left(["_scales"])
    return weights


_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")


def compressed_tensors(stored: StoredTensors) -> dict[str, Node]:
    """`weight` in 8 bits or `weight_packed` in fewer, with `weight_scale`, and for some `weight_zero_point` and
    `weight_g_idx`, the group of each input."""
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
    """Return the configuration of the weights for each group of layers."""
    said = stored.quantization
    if any((said.get("transform_config") or {}).get("config_groups") or {}):
        raise stored.unread("has a transform_config, by which activations are transformed, too")
    if (said.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise stored.unread(f"is sparse ({said['sparsity_config']['format']})")
    groups = list((said.get("config_groups") or {}).values())
    for group in groups:
        kind = group.get("format") or said.get("format")
        if kind not in _FORMATS:
            raise stored.unread(f"is in compressed-tensors' format {kind}, and {', '.join(_FORMATS)} can be read; it")
    weights = [group["weights"] for group in groups if isinstance(group.get("weights"), Mapping)]
    if not weights:
        raise stored.damaged("its configuration has no config_groups that say how weights are quantized")
    return weights


def _packed(stored: StoredTensors, name: str, groups: Sequence[Mapping[str, Any]]) -> tuple[Node, Node | None, int]:
    """Integers and zero points in words, each stored larger by half of what there are; and the bits of one."""
    words = stored.take(f"{name}_packed", name, (torch.int32,), (None, None))
    shape = tuple(read(stored.take(f"{name}_shape", name, INTEGERS, (2,)), {}).tolist())
    said = {int(group.get("num_bits") or 0) for group in groups}
    fitting = [bits for bits in (2, 4, 8) if bits in said and words.shape == (shape[0], -(-shape[1] * bits // 32))]
    if not fitting:
        if not said & {2, 4, 8}:
            raise stored.unread(f"packs {name} in {', '.join(map(str, said))} bits, and 2, 4 or 8 can be read; it")
        raise stored.damaged(
            f"{name}_packed is {list(words.shape)}, and {name}_shape says {list(shape)}, in {sorted(said)} bits"
        )
    bits = fitting[0]
    places, table = in_order(words.dtype, bits), torch.arange(1 << bits, dtype=torch.int16) - (1 << bits - 1)
    values = Unpacked(shape, torch.int8, words, bits, 1, places, table.to(torch.int8))
    zeros = stored.maybe(f"{name}_zero_point", (torch.int32, torch.int8))
    if zeros is not None and zeros.dtype is torch.int32:
        stored.check(f"{name}_zero_point", zeros, (-(-shape[0] * bits // 32), None))
        zeros = Unpacked((shape[0], zeros.shape[1]), torch.int8, zeros, bits, 0, places, table.to(torch.int8))
    return values, zeros, bits


def _blocks(
    stored: StoredTensors, name: str, shape: Sequence[int], scales: Sequence[int], groups: Sequence[Mapping[str, Any]]
) -> tuple[Blocks, ...]:
    """Return the size of the blocks of a weight, from the number of its scales."""
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
        f"the scales of {name} {list(shape)} are {list(scales)}, and no group of the configuration has such"
    )
