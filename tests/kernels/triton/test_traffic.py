"""Bytes that the kernels read and write, counted in Triton's interpreter from elements that no mask hides."""

from __future__ import annotations

import pytest
import torch

from parallelformers_ng.kernels.triton.byte_product import byte_product
from parallelformers_ng.kernels.triton.nibble_product import nibble_product
from parallelformers_ng.kernels.triton.norm_kernel import sum_and_norm
from parallelformers_ng.kernels.triton.partial_results import summed
from parallelformers_ng.kernels.triton.slot_attention import attend
from tests.kernels.triton.agreement import randn
from tests.kernels.triton.interpreter import counted, interpret
from tests.kernels.triton.test_weight_only_products import quantized

interpret()


@pytest.mark.parametrize(("kind", "most"), [("int8", 1.1), ("fp8", 1.1), ("int4", 0.7)])
def test_bytes_of_a_weight(kind: str, most: float) -> None:
    """All bytes of a product of one row are counted: weights, scales, inputs and outputs."""
    outputs, inputs = [96, 32], 1024
    weights, scales = quantized(kind, outputs, inputs, torch.bfloat16)
    with counted() as traffic:
        (nibble_product if kind == "int4" else byte_product)(
            randn(1, inputs, dtype=torch.bfloat16), weights, scales, []
        )
    assert traffic.total() / (sum(outputs) * inputs) <= most


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_weights_are_read_once_for_all_rows(kind: str) -> None:
    weights, scales = quantized(kind, [40, 70], 96, torch.bfloat16)
    with counted() as traffic:
        (nibble_product if kind == "int4" else byte_product)(randn(16, 96, dtype=torch.bfloat16), weights, scales, [])
    for tensor in (*weights, *scales):
        assert traffic.bytes_of(tensor) == tensor.nbytes


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_bytes_of_splits(kind: str) -> None:
    """A weight is read once. Partial results are written once and read once, in fp32."""
    outputs, inputs, rows, splits = [64, 32], 1700, 2, 3
    weights, scales = quantized(kind, outputs, inputs, torch.bfloat16)
    x = randn(rows, inputs, dtype=torch.bfloat16)
    with counted() as traffic:
        y = summed(byte_product(x, weights, scales, []), x.dtype)
    for tensor in weights:
        assert traffic.bytes_of(tensor) == tensor.nbytes
    read_often = sum(outputs) // 32 * x.nbytes + splits * sum(scale.nbytes for scale in scales)
    partial = 2 * splits * y.numel() * 4
    assert traffic.total() == sum(weight.nbytes for weight in weights) + read_often + partial + y.nbytes


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("masked", [False, True], ids=["lengths", "mask"])
def test_bytes_of_keys_and_values(window: int, masked: bool) -> None:
    lengths, width, kv_heads = [0, 5, 290, 130], 32, 2
    q = randn(4, kv_heads * 4 * width, dtype=torch.bfloat16)
    keys, values = (randn(4, kv_heads, 512, width, dtype=torch.bfloat16) for _ in range(2))
    mask = torch.ones(4, 512, dtype=torch.uint8)
    mask[3, :40] = 0
    with counted() as traffic:
        attend(q, keys, values, torch.tensor(lengths), 0.1, mask if masked else None, window=window)
    attended = [length + 1 if not window else min(window, length + 1) for length in lengths]
    attended[3] -= 40 if masked and not window else 0
    necessary = sum(attended) * kv_heads * width * 2
    assert traffic.bytes_of(keys) == traffic.bytes_of(values) == necessary


def test_slots_of_a_batch_read_their_own_columns() -> None:
    """All rows end at one column, and begin where their masks say. Free slots show the newest column only."""
    lengths, columns, width, kv_heads = [100, 290, 5, 130, 1, 1, 1, 1], 300, 32, 2
    rows, free = len(lengths), 4
    q = randn(rows, kv_heads * 4 * width, dtype=torch.bfloat16)
    keys, values = (randn(rows, kv_heads, 512, width, dtype=torch.bfloat16) for _ in range(2))
    mask = torch.zeros(rows, 512, dtype=torch.uint8)
    for row, length in enumerate(lengths):
        mask[row, columns - length : columns] = 1
    with counted() as traffic:
        attend(q, keys, values, torch.tensor([columns - 1]), 0.1, mask)
    necessary = sum(lengths[:-free]) * kv_heads * width * 2
    assert traffic.bytes_of(keys) == traffic.bytes_of(values) <= 1.05 * necessary


def test_bytes_of_a_norm() -> None:
    x = randn(2, 1, 96, dtype=torch.bfloat16)
    with counted() as traffic:
        sum_and_norm(x, x.clone().view(1, 2, 96), x[0, 0].clone(), 1e-5)
    assert traffic.total() == 4 * x.nbytes + x.nbytes
