"""Checkpoints that are quantized already: what their names and numbers mean, library by library.

transformers builds the model as if it were plain, and what it takes for its weights are expressions of what is stored.
A rank that reads its slice reads the integers and the scales of that slice. Integers of 8 bits with a scale for each
output stay what they are; nothing here computes with the others, which are put in high precision where that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallelformers_ng.checkpoint.encoded import Decoded, InLines, Taken
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.nodes import Node
from parallelformers_ng.checkpoint.operations import Cut
from parallelformers_ng.checkpoint.reading import read
from parallelformers_ng.errors import CheckpointError, UnsupportedModelError
from parallelformers_ng.sharding.encoding import Encoding

State = Mapping[str, LazyTensor]
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(eq=False)
class Scaled(InLines):
    """Numbers with a scale for each block of them, in as many dimensions: w = q · s."""

    values: Node
    scales: Node
    block: tuple[int, ...]

    @property
    def sources(self) -> Sequence[Node]:
        return self.values, self.scales

    def computing(self, rank: int | None) -> Callable[[Cut, Taken], Tensor]:
        scales = (
            read(self.scales, {}, rank)
            .float()
            .reshape([-(-n // b) for n, b in zip(self.shape, self.block, strict=True)])
        )

        def compute(cut: Cut, taken: Taken) -> Tensor:
            spread = scales
            for dim, (size, block) in enumerate(zip(self.shape, self.block, strict=True)):
                held = [number // block for start, stop in cut.get(dim, ((0, size),)) for number in range(start, stop)]
                spread = spread.index_select(dim, torch.tensor(held)) if block < size else spread
            return (taken(self._values(cut, rank)).float() * (taken(spread) if spread.shape[-1] > 1 else spread)).to(
                self.dtype
            )

        return compute

    def _values(self, cut: Cut, rank: int | None) -> Tensor:
        return read(self.values, cut, rank)


class Packed(Scaled):
    """The same for integers of 4 bits, eight in a word of 32, stored 8 larger than they are."""

    def _values(self, cut: Cut, rank: int | None) -> Tensor:
        words = read(self.values, cut, rank)
        numbers = (words.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
        return numbers.flatten(-2)[..., : self.shape[-1]] - 8


class Fp4(Scaled):
    """Numbers of 4 bits, two in a byte, the first one in its low half; scales are powers of two (OCP MX, E2M1)."""

    def computing(self, rank: int | None) -> Callable[[Cut, Taken], Tensor]:
        def compute(cut: Cut, taken: Taken) -> Tensor:
            pairs, exponents = read(self.values, cut, rank), read(self.scales, cut, rank)
            codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).int()
            numbers = torch.where(codes < 8, 1.0, -1.0) * _FP4[codes & 7]
            return taken(torch.ldexp(numbers, exponents.int().unsqueeze(-1) - 127).flatten(-2)).to(self.dtype)

        return compute


def unpacked(
    state: State, quantization: Mapping[str, Any], where: object, dtype: torch.dtype, dequantize: bool
) -> dict[str, LazyTensor]:
    """The tensors of a quantized checkpoint under the names, and with the numbers, that a plain one would have.

    Args:
        state: all that is stored, by name.
        quantization: what the configuration says of it.
        where: the checkpoint, for errors.
        dtype: the data type of the weights.
        dequantize: whether ranks may hold in high precision what nothing computes with.

    Raises:
        UnsupportedModelError: the format is not known, or would have to be put in high precision.
        CheckpointError: scales are missing, or are not those of their weight; it is named.
    """
    method = str(quantization.get("quant_method", "")).rpartition(".")[2]
    if method not in _FORMATS:
        raise UnsupportedModelError(
            f"{where} is quantized by {method or 'an unknown method'}, which cannot be cut yet; those of"
            f" {', '.join(_FORMATS)} can. Give a checkpoint in high precision, and quantize='int8' for few bits"
        )
    found = dict(state)
    weights = _FORMATS[method](_Stored(found, quantization, where, dtype))
    for name, node in weights.items():
        if not isinstance(node, Decoded) and not dequantize:
            raise UnsupportedModelError(
                f"{where} is quantized by {method}, and nothing here computes with {name} as it is stored."
                " quantize={'dequantize': True} puts it in high precision on the ranks, and with 'scheme': 'int8' in"
                " 8 bits"
            )
        weight: Any = LazyTensor(node)
        found[name] = weight.transpose(-1, -2) if isinstance(node, Fp4) else weight
    return found


class _Stored:
    """What is stored, taken away as it is understood."""

    def __init__(
        self, state: dict[str, LazyTensor], quantization: Mapping[str, Any], where: object, dtype: torch.dtype
    ) -> None:
        self.state = state
        self.quantization = quantization
        self.where = where
        self.dtype = dtype

    def ending_with(self, ending: str) -> Iterable[str]:
        """The names with that ending, without it."""
        return [name.removesuffix(ending) for name in self.state if name.endswith(ending)]

    def take(self, name: str, of: str) -> Node:
        """What is stored under a name, which belongs to a weight."""
        if name not in self.state:
            raise CheckpointError(f"{self.where} is damaged: {name} is missing, without which {of} cannot be read")
        return self.state.pop(name).node

    def drop(self, *names: str) -> None:
        for name in names:
            self.state.pop(name, None)

    def refuse_left(self, kinds: tuple[torch.dtype, ...], ending: str) -> None:
        """Raise for weights of these types that had no scales."""
        for name, tensor in self.state.items():
            if tensor.dtype in kinds:
                raise CheckpointError(f"{self.where} is damaged: {name} is {tensor.dtype} and has no {ending}")

    def scaled(self, name: str, values: Node, scales: Node, shape: tuple[int, ...], packed: bool = False) -> Node:
        """A weight, given its numbers and their scales: one for all, for each row, or for blocks."""
        if not scales.dtype.is_floating_point or not (packed or values.dtype in (*_FP8, torch.int8)):
            raise UnsupportedModelError(
                f"{self.where} holds {name} as {values.dtype} with scales in {scales.dtype}, which cannot be cut yet"
            )
        sizes = scales.shape if len(scales.shape) == len(shape) else (1,) * len(shape)
        blocks = self._blocks(name, shape, sizes)
        if any(-(-size // block) != count for size, block, count in zip(shape, blocks, sizes, strict=True)):
            raise CheckpointError(
                f"{self.where} is damaged: the scales of {name} {list(shape)} are {list(scales.shape)}, and blocks of"
                f" {list(blocks)} need others"
            )
        if values.dtype is torch.int8 and blocks == (1, *shape[1:]) and len(shape) == 2:
            # widened: scales in 16 bits are exact in 32
            wide: Any = LazyTensor(scales).to(torch.float32)
            return Decoded(shape, self.dtype, Encoding("int8", -1, shape[1]), (values, wide.node))
        return (Packed if packed else Scaled)(shape, self.dtype, values, scales, blocks)

    def _blocks(self, name: str, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
        """What the configuration says of blocks, else what the numbers of scales allow."""
        said = self.quantization.get("weight_block_size") or ()
        groups: list[Any] = list((self.quantization.get("config_groups") or {}).values())
        group = groups[0]["weights"].get("group_size") if groups else None
        if len(sizes) >= 2 and said and max(sizes) > 1:
            return (1,) * (len(shape) - 2) + tuple(
                min(block, size) for block, size in zip(said, shape[-2:], strict=True)
            )
        if group and group > 0 and sizes[-1] > 1:
            return (*(1,) * (len(shape) - 1), group)
        return tuple(1 if count == size else size for size, count in zip(shape, sizes, strict=True))


def _fp8(stored: _Stored) -> dict[str, Node]:
    """DeepSeek's: `weight` in 8-bit floats, `weight_scale_inv` with a scale for each block."""
    weights = {}
    for name in stored.ending_with("_scale_inv"):
        scales, values = stored.take(f"{name}_scale_inv", name), stored.take(name, f"{name}_scale_inv")
        weights[name] = stored.scaled(name, values, scales, values.shape)
        stored.drop(f"{name.removesuffix('.weight')}.activation_scale")
    stored.refuse_left(_FP8, "scale_inv")
    return weights


def _compressed_tensors(stored: _Stored) -> dict[str, Node]:
    """`weight` in 8 bits or `weight_packed` in 4, with `weight_scale`; symmetric, for rows, groups, blocks or all."""
    weights = {}
    for path in stored.ending_with(".weight_scale"):
        name = f"{path}.weight"
        for other in ("weight_zero_point", "weight_g_idx", "weight_global_scale"):
            if f"{path}.{other}" in stored.state:
                raise UnsupportedModelError(f"{stored.where} has {path}.{other}, which cannot be cut yet")
        scales = stored.take(f"{name}_scale", name)
        if f"{name}_packed" in stored.state:
            values = stored.take(f"{name}_packed", name)
            shape = tuple(read(stored.take(f"{name}_shape", name), {}).tolist())
            bits = next(iter(stored.quantization["config_groups"].values()))["weights"]["num_bits"]
            if bits != 4:
                raise UnsupportedModelError(f"{stored.where} packs {name} in {bits} bits; 4 can be read, or 8 unpacked")
            if values.shape != (*shape[:-1], -(-shape[-1] // 8)):
                raise CheckpointError(
                    f"{stored.where} is damaged: {name}_packed is {list(values.shape)}, and {name}_shape {list(shape)}"
                )
            weights[name] = stored.scaled(name, values, scales, shape, packed=True)
        else:
            values = stored.take(name, f"{name}_scale")
            weights[name] = stored.scaled(name, values, scales, values.shape)
        stored.drop(*(f"{path}.{end}" for end in ("input_scale", "input_zero_point", "output_scale")))
    stored.refuse_left((*_FP8, torch.int8), "weight_scale")
    return weights


def _mxfp4(stored: _Stored) -> dict[str, Node]:
    """gpt-oss's: `…_blocks`, two numbers in a byte and 32 in a block, `…_scales` with the exponent of each."""
    weights: dict[str, Node] = {}
    for name in stored.ending_with("_blocks"):
        values, scales = stored.take(f"{name}_blocks", name), stored.take(f"{name}_scales", name)
        if values.shape[:-1] != scales.shape or values.shape[-1] != 16:
            raise CheckpointError(
                f"{stored.where} is damaged: {name}_blocks {list(values.shape)} and {name}_scales"
                f" {list(scales.shape)} do not belong together"
            )
        shape = (*values.shape[:-2], values.shape[-2] * 32)
        weights[name] = Fp4(shape, stored.dtype, values, scales, ())
    return weights


_FORMATS: dict[str, Callable[[_Stored], dict[str, Node]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
}
