"""Decode attention over a slot cache in Triton's interpreter, against its twin in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallelformers_ng.kernels.triton import slot_attention
from parallelformers_ng.kernels.triton.slot_attention import attend, splits_of
from tests.kernels.triton.agreement import DTYPES, assert_agrees, randn
from tests.kernels.triton.interpreter import interpret
from tests.kernels.triton.twins import attention_twin

interpret()

LENGTHS = {
    "ragged": [0, 5, 290],
    "full": [299, 299, 299],
    "one row": [200],
    "edges": [63, 64, 127],
    "empty rows": [-1, 100, -1],
}


def slots(lengths: list[int], width: int, kv_heads: int, groups: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return queries, and keys and values of 300 positions; NaN and infinities lie where no row has a token."""
    rows = len(lengths)
    q = randn(rows, kv_heads * groups * width, dtype=dtype)
    keys, values = (randn(rows, kv_heads, 300, width, dtype=dtype, seed=seed) for seed in (1, 2))
    for row, length in enumerate(lengths):
        keys[row, :, length + 1 :], values[row, :, length + 1 :] = float("nan"), float("inf")
    return q, keys, values, torch.tensor(lengths)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths_of_rows(lengths: str, dtype: torch.dtype) -> None:
    arguments = (*slots(LENGTHS[lengths], 24, 2, 8, dtype), 24**-0.5)
    assert_agrees(attend(*arguments), attention_twin, *arguments)


@pytest.mark.parametrize(("width", "kv_heads", "groups"), [(16, 1, 1), (64, 1, 17), (80, 2, 7)])
def test_heads_and_widths(width: int, kv_heads: int, groups: int) -> None:
    arguments = (*slots([150, 20], width, kv_heads, groups, torch.bfloat16), width**-0.5)
    assert_agrees(attend(*arguments), attention_twin, *arguments)


@pytest.mark.parametrize("window", [1, 64, 100, 1000])
def test_windows(window: int) -> None:
    q, keys, values, lengths = slots([0, 5, 290], 16, 1, 2, torch.bfloat16)
    for row, length in enumerate(lengths.tolist()):
        keys[row, :, : max(0, length + 1 - window)] = float("nan")
    output = attend(q, keys, values, lengths, 0.3, window=window)
    assert_agrees(output, attention_twin, q, keys, values, lengths, 0.3, None, window)


@pytest.mark.parametrize("rows_of_mask", [1, 3])
def test_masks_hide_what_they_hide(rows_of_mask: int) -> None:
    """The second row of the mask hides everything, and the row gets zeros."""
    q, keys, values, lengths = slots([290, 290, 290], 16, 1, 2, torch.bfloat16)
    mask = (randn(rows_of_mask, 300) > 0).to(torch.uint8)
    mask[0, :128] = 0
    mask[1:2] = 0
    for row in range(3):
        hidden = mask[row % rows_of_mask] == 0
        keys[row, :, hidden], values[row, :, hidden] = float("nan"), float("inf")
    arguments = (q, keys, values, lengths, 0.3, mask)
    output = attend(*arguments)
    assert_agrees(output, attention_twin, *arguments)
    assert output[1].any() == (rows_of_mask == 1)


@pytest.mark.parametrize("scale", [10.0, 1e4])
def test_large_scores_do_not_overflow(scale: float) -> None:
    arguments = (*slots([290], 16, 1, 2, torch.float32), scale)
    assert_agrees(attend(*arguments), attention_twin, *arguments)


def test_one_length_serves_all_rows_and_is_counted() -> None:
    q, keys, values, _ = slots([40, 40], 16, 1, 2, torch.float32)
    length = torch.tensor([40])
    output = attend(q, keys, values, length, 0.3, None, length)
    assert length.tolist() == [41]
    assert_agrees(output, attention_twin, q, keys, values, torch.tensor([40, 40]), 0.3)


@pytest.mark.parametrize("splits", [1, 2, 3, 64])
def test_every_number_of_splits_gives_the_same(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_attention, "splits_of", lambda pairs, room: splits)
    arguments = (*slots([0, 5, 290], 16, 1, 2, torch.bfloat16), 0.3)
    assert_agrees(attend(*arguments), attention_twin, *arguments)


def test_lengths_beyond_the_room_end_there() -> None:
    arguments: tuple[Any, ...] = (*slots([299], 16, 1, 2, torch.float32)[:3], torch.tensor([5000]), 0.3)
    assert_agrees(attend(*arguments), attention_twin, *arguments)


def test_splits_fill_a_card_and_no_more() -> None:
    assert splits_of(8, 128) == 1
    assert splits_of(8, 8192) == 64
    assert splits_of(32 * 8, 32768) == 2
    assert splits_of(4096, 32768) == 1
