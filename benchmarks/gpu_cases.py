"""Describes the Triton kernels of a decode step at the sizes of a model, for `benchmarks.gpu_parts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import gpu

Tensors = tuple[torch.Tensor, ...]
SPLITS = 4
"""Splits of the 8B shape's output and down projections."""


@dataclass
class Case:
    """A kernel at one size.

    Attributes:
        name: name of the kernel, with its size.
        nbytes: bytes that the kernel must read and write.
        make: function that returns tensors for one run, with new random numbers.
        kernel, twin: functions of these tensors that return tensors; both may change the tensors.
        twin_waits: whether the twin waits for the device, so that it cannot be captured.
    """

    name: str
    nbytes: int
    make: Callable[[], Any]
    kernel: Callable[..., Any]
    twin: Callable[..., Any]
    twin_waits: bool = False


def cases(shape: str, device: str, numbers_of_rows: Sequence[int], contexts: Sequence[int]) -> Iterator[Case]:
    """Yield each kernel of `kernels/triton` at the sizes of a Llama's decode step, in bf16. Imports Triton.

    Args:
        shape: name in `gpu.SHAPES`.
        device: "cuda" or "cpu".
        numbers_of_rows: rows of a step; the products take at most 16.
        contexts: keys of each row, for attention.
    """
    from parallelformers_ng.kernels.triton import gate_kernel, norm_kernel, rotary_kernel, slot_attention
    from parallelformers_ng.kernels.triton.byte_product import MAX_ROWS, byte_product
    from parallelformers_ng.kernels.triton.nibble_product import nibble_product
    from parallelformers_ng.kernels.triton.partial_results import summed
    from tests.kernels.triton import twins

    sizes = gpu.SHAPES[shape]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    width = hidden // heads

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    def partial_results(splits: int, rows: int, outputs: int) -> torch.Tensor:
        return randn(splits, rows, outputs).to(torch.bfloat16 if splits == 1 else torch.float32)

    def quantized(kind: str, outputs: int, inputs: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        numbers, scales = gpu.encoding_of(kind, inputs).encode(randn(outputs, inputs))
        return [numbers], [scales]

    def attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return slot_attention.attend(q, keys, values, lengths, width**-0.5)

    def attended_by_twin(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> Any:
        return twins.attention_twin(q, keys, values, lengths, width**-0.5)

    def rotated(by: Callable[..., Any]) -> Callable[..., Any]:
        def run(q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, place: Any) -> Tensors:
            return by(q, k, v, cos, sin, None, None, 1e-5, keys, values, place), keys, values

        return run

    for rows in numbers_of_rows:
        for splits in (1, SPLITS):
            of, each = ("", 2) if splits == 1 else (f" of {splits} splits", 4 * splits)
            yield Case(
                f"residual and norm{of}, {rows} rows", rows * hidden * (6 + each) + hidden * 2,
                lambda rows=rows, splits=splits: (
                    randn(rows, 1, hidden), partial_results(splits, rows, hidden), randn(hidden),
                ),
                lambda x, d, w: norm_kernel.sum_and_norm(x, d, w, 1e-5),
                lambda x, d, w: twins.norm_twin(x, d, w, 1e-5),
            )  # fmt: skip
            yield Case(
                f"gate{of}, {rows} rows", rows * inner * (2 + 2 * each),
                lambda rows=rows, splits=splits: partial_results(splits, rows, 2 * inner).chunk(2, -1),
                lambda g, u: gate_kernel.gated(g, u, torch.bfloat16),
                lambda g, u: twins.gate_twin(g, u, torch.bfloat16),
            )  # fmt: skip
            yield Case(
                f"rotary and write{of}, {rows} rows",
                rows * (heads + 2 * kv_heads) * width * (2 + each) + rows * width * 4,
                lambda rows=rows, splits=splits: (
                    *partial_results(splits, rows, (heads + 2 * kv_heads) * width).split(
                        [heads * width, kv_heads * width, kv_heads * width], -1
                    ),
                    randn(rows, width), randn(rows, width), randn(rows, kv_heads, 16, width),
                    randn(rows, kv_heads, 16, width), torch.full((rows,), 7, device=device),
                ),
                rotated(rotary_kernel.rotate_and_write), rotated(twins.rotary_twin), twin_waits=True,
            )  # fmt: skip
        yield Case(
            f"sum of {SPLITS} splits, {rows} rows", rows * hidden * (4 * SPLITS + 2),
            lambda rows=rows: (partial_results(SPLITS, rows, hidden),),
            lambda p: summed(p, torch.bfloat16), lambda p: twins.sum_twin(p, torch.bfloat16),
        )  # fmt: skip
        for kind, size in (("int8", 1.0), ("fp8", 1.0), ("int4", 0.5625)) if rows <= MAX_ROWS else ():
            product, twin = (
                (nibble_product, twins.nibble_product_twin)
                if kind == "int4"
                else (byte_product, twins.byte_product_twin)
            )
            for what, outputs, inputs in (("up", inner, hidden), ("down", hidden, inner)):
                yield Case(
                    f"{kind} product {what}, {rows} rows", int(inner * hidden * size) + rows * (hidden + inner) * 2,
                    lambda rows=rows, kind=kind, outputs=outputs, inputs=inputs: (
                        randn(rows, inputs), *quantized(kind, outputs, inputs),
                    ),
                    lambda x, q, s, by=product: summed(by(x, q, s, []), x.dtype),
                    lambda x, q, s, by=twin: by(x, q, s, []),
                )  # fmt: skip
        for context in contexts:
            cache = (rows, kv_heads, context, width)
            yield Case(
                f"attention, {rows} rows, {context} keys", 4 * rows * kv_heads * context * width,
                lambda rows=rows, cache=cache, context=context: (
                    randn(rows, heads * width), randn(*cache), randn(*cache),
                    torch.full((rows,), context - 1, dtype=torch.int32, device=device),
                ),
                attended, attended_by_twin, twin_waits=True,
            )  # fmt: skip
