"""Compares attention in C with transformers' attention, and tests the cases that torch computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from parallelformers_ng.kernels import sdpa
from parallelformers_ng.kernels.sdpa import with_kernel

pytestmark = pytest.mark.skipif(sdpa._decode is None, reason="the C kernel is not built")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SIZES = [  # batch, query heads, query heads per key/value head, tokens, widths of keys and values
    (1, 1, 1, 1, 16, 16),
    (1, 8, 2, 7, 128, 128),
    (3, 6, 1, 33, 64, 64),
    (2, 9, 3, 100, 20, 12),
    (1, 14, 7, 513, 96, 100),
    (2, 5, 5, 64, 80, 33),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of token counts of the kernel's calls."""
    seen: list[int] = []

    class Counting:
        @staticmethod
        def attention(*arguments: Any) -> None:
            seen.append(arguments[19])
            kernel.attention(*arguments)

    kernel = sdpa._decode
    monkeypatch.setattr(sdpa, "_decode", Counting)
    return seen


def _inputs(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the module, the query, and a key and a value with free memory after their tokens, like caches that grow in
    place."""
    batch, heads, shared, tokens, width, value_width = sizes
    torch.manual_seed(sum(sizes))
    query = torch.randn(batch, heads, 1, width, dtype=dtype) * 3
    key = torch.randn(batch, heads // shared, tokens + 9, width, dtype=dtype)[:, :, :tokens]
    value = torch.randn(batch, tokens + 5, heads // shared, value_width, dtype=dtype)[:, :tokens].transpose(1, 2)
    return SimpleNamespace(num_key_value_groups=shared), query, key, value


def _masks(sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    batch, heads, _, tokens, *_ = sizes
    seen = torch.rand(batch, 1, 1, tokens) > 0.4
    seen[..., -1] = True
    return {
        "none": None,
        "seen": seen,
        "seen by each head": seen.expand(batch, heads, 1, tokens),
        "added to each head": torch.randn(1, heads, 1, tokens, dtype=dtype),
        "lowest where unseen": torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype),
    }


@FLOATS
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_are_as_exact_as_those_of_torch(sizes: tuple[int, ...], dtype: torch.dtype, calls: list[int]) -> None:
    module, *states = _inputs(sizes, dtype)
    for name, mask in _masks(sizes, dtype).items():
        for scaling in (None, 0.3):
            with torch.inference_mode():
                got, weights = with_kernel(sdpa_attention_forward)(module, *states, mask, scaling=scaling)
            wide = None if mask is None or mask.dtype is torch.bool else mask.double()
            wanted, _ = sdpa_attention_forward(
                module, *(state.double() for state in states), mask if wide is None else wide, scaling=scaling
            )
            assert weights is None
            assert got.is_contiguous()
            torch.testing.assert_close(got, wanted.to(dtype), msg=lambda text, name=name: f"{name}: {text}")
    assert calls == [sizes[3]] * 10


@FLOATS
def test_masked_row_gives_zeros_and_nan_stays_nan(dtype: torch.dtype, calls: list[int]) -> None:
    module, query, key, value = _inputs(SIZES[2], dtype)
    unseen = torch.zeros(3, 1, 1, 33, dtype=torch.bool)
    query[0, 1] = torch.nan
    with torch.inference_mode():
        nothing, _ = with_kernel(sdpa_attention_forward)(module, query.nan_to_num(), key, value, unseen)
        some, _ = with_kernel(sdpa_attention_forward)(module, query, key, value, None)
    assert not nothing.any()
    assert some[0, 0, 1].isnan().all()
    assert some.isnan().sum() == 64
    assert len(calls) == 2


def test_attention_is_left_to_torch_when_needed(calls: list[int]) -> None:
    module, query, key, value = _inputs(SIZES[1], torch.float32)
    attend = with_kernel(sdpa_attention_forward)
    attend(module, query, key, value, None)  # outside of inference mode
    with torch.inference_mode():
        attend(module, torch.cat([query, query], 2), key, value, None)
        attend(module, query, key, value, torch.zeros(1, 1, 1, 7, dtype=torch.float64).float(), dropout=0.1)
        attend(module, query.half(), key.half(), value.half(), None)
        attend(module, query, key, value, None, position_bias=torch.zeros(1, 8, 1, 7))
        with torch.autocast("cpu", torch.bfloat16):
            attend(module, query, key, value, None)
        with pytest.raises(RuntimeError):
            attend(module, query, key, value, torch.zeros(1, 1, 1, 8))
    assert calls == []
