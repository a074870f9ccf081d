"""Tests the PTX that widens 4-bit numbers, by an interpreter of its instructions: Triton's interpreter runs none."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from parallelformers_ng.kernels.triton import nibble_product

Register = np.ndarray  # uint32, one element for each thread


def floats_of(register: Register, dtype: torch.dtype) -> torch.Tensor:
    """Return the two floats of a register, float64 `[threads, 2]`, the one in the low half first."""
    halves = np.stack((register & 0xFFFF, register >> 16), -1).astype(np.uint16)
    return torch.from_numpy(halves.view(np.int16)).view(dtype).double()


def register_of(floats: torch.Tensor, dtype: torch.dtype) -> Register:
    halves = floats.float().to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return halves[:, 0] | halves[:, 1] << 16


def permuted(first: Register, second: Register, selector: int) -> Register:
    """Return `prmt.b32`: digit n of the selector chooses byte n among the bytes of `first`, then of `second`."""
    both = [(register >> 8 * place) & 0xFF for register in (first, second) for place in range(4)]
    result = np.zeros_like(first)
    for place in range(4):
        result |= both[selector >> 4 * place & 7] << 8 * place
    return result


def looked_up(first: Register, second: Register, third: Register, table: int) -> Register:
    """Return `lop3.b32`: bit 4·a + 2·b + c of the table is the result for bits a, b and c."""
    result = np.zeros_like(first)
    for at in range(8):
        if table >> at & 1:
            terms = (
                each if at >> place & 1 else ~each
                for each, place in zip((first, second, third), (2, 1, 0), strict=True)
            )
            result |= np.bitwise_and.reduce([*terms])
    return result


def run(text: str, inputs: dict[str, Register], dtype: torch.dtype) -> dict[str, Register]:
    """Run PTX code, and return all registers. See "PTX ISA", chapter "Instruction Set"."""
    registers = dict(inputs)
    like = next(iter(inputs.values()))

    def value(name: str) -> Register:
        return registers[name] if name in registers else np.full_like(like, int(name, 0))

    for line in text.strip().splitlines():
        if line in "{}" or line.startswith(".reg"):
            continue
        name, result, *rest = re.split(r"[ ,;]+", line.strip(" ;"))
        arguments = [value(each) for each in rest]
        match name.split("."):
            case ["mov", _]:
                registers[result] = arguments[0]
            case ["shr", _]:
                registers[result] = arguments[0] >> arguments[1]
            case ["prmt", _]:
                registers[result] = permuted(*arguments[:2], int(rest[2], 0))
            case ["lop3", _]:
                registers[result] = looked_up(*arguments[:3], int(rest[3], 0))
            case ["fma", "rn", _]:
                a, b, c = (floats_of(each, dtype) for each in arguments)
                registers[result] = register_of(a * b + c, dtype)  # exact in float64
            case _:
                raise AssertionError(line)
    return registers


@pytest.mark.parametrize(
    ("dtype", "text"),
    [(torch.bfloat16, nibble_product._BF16), (torch.float16, nibble_product._FP16)],
    ids=["bf16", "fp16"],
)
def test_pairs_are_widened_and_scaled(dtype: torch.dtype, text: str) -> None:
    """Every byte is in every place, with scales of all sizes, also below the least normal float16."""
    numbers = torch.stack([torch.arange(256).roll(37 * place) for place in range(4)], -1).to(torch.uint8)
    random = torch.Generator().manual_seed(0)
    scales = (torch.randn(256, 4, generator=random) * 10 ** -(torch.rand(256, 4, generator=random) ** 8)).to(dtype)
    words = numbers.numpy().view(np.uint32).flatten()
    pairs = {"$5": scales[:, :2], "$6": scales[:, 2:]}
    inputs = {"$4": words} | {name: register_of(pair, dtype) for name, pair in pairs.items()}
    registers = run(getattr(text, "value", text), inputs, dtype)
    signed = numbers.view(torch.int8)
    for results, integers in ((("$0", "$1"), signed << 4 >> 4), (("$2", "$3"), signed >> 4)):
        got = torch.cat([floats_of(registers[name], dtype) for name in results], -1)
        assert torch.equal(got, (integers * scales).to(dtype).double())
