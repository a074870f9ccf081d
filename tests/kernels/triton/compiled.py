"""Compiles the kernels for cards that are not here, and prints what their code needs.

    python -m tests.kernels.triton.compiled [CAPABILITY …] [--shape NAME …]       JSON; all cards without arguments
    TRITON_DEFAULT_FP_FUSION=1 python -m tests.kernels.triton.compiled > tests/kernels/triton/compiled.json

A test compares the output with that file. For each kernel, shape and card it has the numbers that `COLUMNS` names.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from parallelformers_ng.kernels.triton.byte_product import byte_product_launches, splits_of
from parallelformers_ng.kernels.triton.gate_kernel import gate_launches
from parallelformers_ng.kernels.triton.launch import Launch
from parallelformers_ng.kernels.triton.nibble_product import nibble_product_launches
from parallelformers_ng.kernels.triton.norm_kernel import norm_launches
from parallelformers_ng.kernels.triton.partial_results import sum_launches
from parallelformers_ng.kernels.triton.rotary_kernel import rotary_launches
from parallelformers_ng.kernels.triton.slot_attention import attention_launches

CAPABILITIES = (80, 86, 89, 90, 100)
COLUMNS = ("registers", "spilled", "shared", "wide")
"""Registers of a thread, bytes of spilled registers, bytes of shared memory, and the percentage of the bytes that the
inner loop, or a kernel without one, loads from global memory 16 bytes at a time."""
_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32"}
_TYPES[torch.int64] = "i64"
_BIN = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's layer."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    width: int
    normed: bool = False
    biased: bool = False


SHAPES = {
    "Llama 3.2 1B": Shape(2048, 8192, 32, 8, 64),
    "Llama 3.1 8B": Shape(4096, 14336, 32, 8, 128),
    "Llama 3.1 70B": Shape(8192, 28672, 64, 8, 128),
    "Qwen2.5 7B": Shape(3584, 18944, 28, 4, 128),
    "Qwen3 4B": Shape(2560, 9728, 32, 8, 128, normed=True),
}
NARROW = {"narrow heads": Shape(64, 128, 6, 3, 8, biased=True)}
"""Not in the table: the shape of many tests, with heads narrower than the products of a tensor core. Its quantized
products have biases."""
ROWS, POSITIONS = 4, 8192


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without memory: a launch needs its shape."""
    return torch.empty(sizes, dtype=dtype, device="meta")


def split(*widths: int, inputs: int) -> tuple[Tensor, ...]:
    """Return the outputs of joined 8-bit weights of these widths: partial results, if the inputs are split."""
    splits = splits_of(sum(-(-width // 32) for width in widths), inputs)
    outputs = empty(splits, ROWS, sum(widths), dtype=torch.bfloat16 if splits == 1 else torch.float32)
    return outputs.split([*widths], -1)


def only(made: tuple[tuple[Launch], Any]) -> Launch:
    """Return the launch of an operator that has one."""
    (launch,), _ = made
    return launch


def launches(shape: Shape) -> Iterator[tuple[str, Launch]]:
    """Yield the launches of a layer, of its quantized products, and of the kernels that read their partial results.

    The gate's partial results are those of a rank of eight.
    """
    states, wide = empty(ROWS, shape.hidden), empty(ROWS, shape.heads * shape.width)
    angles, cache = empty(1, shape.width), empty(ROWS, shape.kv_heads, POSITIONS, shape.width)
    head_norm = empty(shape.width) if shape.normed else None
    length = empty(1, dtype=torch.int64)
    widths = [shape.heads * shape.width, *[shape.kv_heads * shape.width] * 2]
    plain, (down,) = states.unsqueeze(0), split(shape.hidden, inputs=shape.inner)
    for suffix, added in (("", plain), (" of splits", down)):
        yield f"norm{suffix}", only(norm_launches(states, added, empty(shape.hidden), 1e-5))
    plain_heads = [empty(1, ROWS, each) for each in widths]
    for suffix, heads in (("", plain_heads), (" of splits", split(*widths, inputs=shape.hidden))):
        norms = (head_norm, head_norm, 1e-6)
        yield f"rotary{suffix}", only(rotary_launches(*heads, angles, angles, *norms, cache, cache, length))
    mask = empty(ROWS, POSITIONS, dtype=torch.uint8)
    (first, second), _ = attention_launches(wide, cache, cache, length, 0.1, mask, length)
    yield "attention, splits", first
    yield "attention, sum", second
    inner = empty(1, ROWS, shape.inner)
    yield "gate", only(gate_launches(inner, inner, torch.bfloat16))
    gate, up = split(*[shape.inner // 8] * 2, inputs=shape.hidden)
    yield "gate of splits", only(gate_launches(gate, up, torch.bfloat16))
    pair = [shape.inner] * 2
    scales = [empty(outputs, 1, dtype=torch.float32) for outputs in pair]
    biases = [empty(outputs) for outputs in pair] if shape.biased else []
    for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        weights = [empty(outputs, shape.hidden, dtype=dtype) for outputs in pair]
        yield f"product, {name}", only(byte_product_launches(states, weights, scales, biases))
        weight, scale = empty(shape.hidden, shape.inner, dtype=dtype), empty(shape.hidden, 1, dtype=torch.float32)
        yield f"product, splits, {name}", only(byte_product_launches(inner[0], [weight], [scale], []))
    if len(down) > 1:
        yield "sum of splits", only(sum_launches(down, torch.bfloat16))
    weights = [empty(outputs, shape.hidden // 2, dtype=torch.uint8) for outputs in pair]
    scales = [empty(outputs, shape.hidden // 32) for outputs in pair]
    yield "product, int4", only(nibble_product_launches(states, weights, scales, biases))
    weight, scale = empty(shape.hidden, shape.inner // 2, dtype=torch.uint8), empty(shape.hidden, shape.inner // 32)
    yield "product, splits, int4", only(nibble_product_launches(inner[0], [weight], [scale], []))


def source_of(launch: Launch) -> ASTSource:
    """Return what the compiler gets of a launch: types, constants, and which numbers are multiples of 16."""
    signature: dict[str, str] = dict.fromkeys(launch.constants, "constexpr")
    constants, attributes = dict(launch.constants), {}
    for name, value in launch.arguments.items():
        at = (launch.kernel.arg_names.index(name),)
        if isinstance(value, Tensor):
            signature[name], is_aligned = f"*{_TYPES[value.dtype]}", True
        elif value is None or (type(value) is int and value == 1 and name not in launch.kernel.do_not_specialize):
            signature[name], constants[name] = "constexpr", value
            continue
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if value < 1 << 31 else "i64"
            is_aligned = type(value) is int and value % 16 == 0
        if is_aligned and name not in (launch.kernel.do_not_specialize or ()):
            attributes[at] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in launch.kernel.arg_names}
    return ASTSource(launch.kernel, signature, constants, attributes)


def needs(launch: Launch, capability: int) -> list[int]:
    """Return the numbers of `COLUMNS` of the table for a launch."""
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    kernel = triton.compile(source_of(launch), target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [_BIN / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        code = subprocess.run([_BIN / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    figures = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    spilled = figures["STACK"] + figures["LOCAL"] + 4 * len(re.findall(r"\b(?:LDL|STL)\b", code))
    return [figures["REG"], spilled, kernel.metadata.shared, wide_share(code)]


def wide_share(code: str) -> int:
    """Return the last number of `COLUMNS` for a kernel's machine code."""
    lines = code.splitlines()
    labels = {line.strip()[:-1]: number for number, line in enumerate(lines) if re.match(r"\s*\.L_\S+:$", line)}
    jumps = ((number, re.search(r"BRA.*`\((\S+)\)", line)) for number, line in enumerate(lines))
    loops = [(labels[jump[1]], number) for number, jump in jumps if jump and labels.get(jump[1], number) < number]
    spans = ["\n".join(lines[start : end + 1]) for start, end in loops]
    loads = max(spans, key=lambda span: len(re.findall(_LOAD, span)), default="")
    sizes = [_bytes(load) for load in re.findall(_LOAD, loads) or re.findall(_LOAD, code)]
    return round(100 * sum(size for size in sizes if size == 16) / sum(sizes))


_LOAD = r"\b(?:LDG|LDGSTS)\.\S+"


def _bytes(load: str) -> int:
    """Return the bytes of a load, by its name: `LDG.E.U16`, `LDGSTS.E.BYPASS.128`."""
    bits = re.search(r"\.[US]?(8|16|64|128)\b", load)
    return int(bits[1]) // 8 if bits else 4


def table(capabilities: tuple[int, ...], shapes: list[str]) -> dict[str, dict[str, list[int]]]:
    """Return the table: kernel and shape → card → needs. Launches with one code are compiled once."""
    known: dict[Any, list[int]] = {}
    lines: dict[str, dict[str, list[int]]] = {}
    for shape in shapes:
        for name, launch in launches((SHAPES | NARROW)[shape]):
            source = source_of(launch)
            for capability in capabilities:
                key = (launch.kernel.fn, str(source.signature), str(source.constants), str(source.attrs), capability)
                if key not in known:
                    known[key] = needs(launch, capability)
                lines.setdefault(f"{name}, {shape}", {})[f"sm_{capability}"] = known[key]
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("capabilities", nargs="*", type=int, default=CAPABILITIES)
    parser.add_argument("--shape", action="append", choices=SHAPES | NARROW)
    chosen = parser.parse_args()
    lines = table(tuple(chosen.capabilities), chosen.shape or [*SHAPES])
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cards)}" for name, cards in lines.items())
    header = f'"triton": {json.dumps(triton.__version__)},\n "columns": {json.dumps(COLUMNS)}'
    print(f'{{{header},\n "kernels": {{\n{rows}\n}}}}')
