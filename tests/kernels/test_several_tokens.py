"""Tests the kernels with several new tokens per sequence: prompts, parts of prompts, and tokens to verify."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from parallelformers_ng.kernels import operators
from parallelformers_ng.kernels.operators import MAX_ROWS, spans_of
from tests.helpers.step_models import FAMILIES, LAYERS, VOCABULARY, distance, models

pytestmark = pytest.mark.skipif(operators._decode is None, reason="the C kernel is not built")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the row limits, so that the kernels compute every step on any processor."""
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setitem(MAX_ROWS, dtype, 512)


def ids_of(rows: int, tokens: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(rows + tokens))


def run(model: Any, ids: Tensor, mask: Tensor, pieces: Sequence[int]) -> tuple[Tensor, DynamicCache]:
    """Run sequences in pieces; return the scores of all tokens, and the cache."""
    cache, end, scores = DynamicCache(config=model.config), 0, []
    with torch.inference_mode():
        for piece in pieces:
            begin, end = end, end + piece
            seen = mask[:, :end]
            positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, begin:]
            output = model(ids[:, begin:end], attention_mask=seen, position_ids=positions, past_key_values=cache)
            scores.append(output.logits)
    return torch.cat(scores, 1), cache


@pytest.mark.parametrize("as_one", [True, False], ids=["stack", "layers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_pieces_equal_those_of_transformers(family: str, as_one: bool, calls: Counter[str]) -> None:
    stock, fused = models(family, as_one=as_one)
    for rows, padding, pieces in ((1, 0, (4, 1, 6)), (3, 2, (5, 3, 1, 8)), (2, 7, (40, 9))):
        calls.clear()
        ids = ids_of(rows, sum(pieces))
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        (got, cache), (wanted, _) = run(fused, ids, mask, pieces), run(stock, ids, mask, pieces)
        seen = mask.bool()
        assert distance(got[seen], wanted[seen]) < 1e-5
        assert cache.get_seq_length() == sum(pieces)
        steps = len(pieces)
        each = {"decoder_layers": 1} if as_one else {"attention_half": LAYERS, "feed_half": LAYERS}
        assert calls == {name: count * steps for name, count in each.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_pieces_are_as_exact_as_transformers(family: str) -> None:
    stock, fused = models(family, torch.bfloat16, as_one=True)
    ids = ids_of(2, 30)
    mask = torch.ones_like(ids)
    got, _ = run(fused, ids, mask, (21, 9))
    usual, _ = run(stock, ids, mask, (21, 9))
    exact, _ = run(stock.double(), ids, mask, (21, 9))
    assert distance(got, exact) < 1.2 * distance(usual, exact) + 1e-3


@DTYPES
@pytest.mark.parametrize("family", ["llama", "qwen3", "llama with odd sizes"])
def test_length_of_pieces_changes_no_bit(family: str, dtype: torch.dtype) -> None:
    _, fused = models(family, dtype, as_one=True)
    ids = ids_of(1, 53)
    mask = torch.ones_like(ids)
    whole, kept = run(fused, ids, mask, (53,))
    for pieces in ((1,) * 53, (8, 8, 8, 8, 8, 8, 5), (30, 1, 22)):
        parts, cache = run(fused, ids, mask, pieces)
        assert torch.equal(parts, whole), pieces
        for mine, its in zip(cache.layers, kept.layers, strict=True):
            assert torch.equal(mine.keys, its.keys)
            assert torch.equal(mine.values, its.values)


@DTYPES
@pytest.mark.parametrize("family", ["llama", "qwen3", "llama with odd sizes"])
def test_other_sequences_change_no_bit_of_a_sequence(family: str, dtype: torch.dtype) -> None:
    """In a batch padded on the left, each sequence gets the same scores as alone."""
    _, fused = models(family, dtype, as_one=True)
    lengths, longest = [23, 9, 16, 2, 23], 23
    together = torch.zeros(len(lengths), longest + 3, dtype=torch.long)
    for row, length in enumerate(lengths):
        together[row, longest - length :] = ids_of(1, length + 3)[0]
    scores, _ = run(fused, together, (together > 0).long(), (longest, 1, 2))
    for row, length in enumerate(lengths):
        ids = ids_of(1, length + 3)
        alone, _ = run(fused, ids, torch.ones_like(ids), (length, 1, 2))
        assert torch.equal(scores[row, longest - length :], alone[0]), row


def test_torch_computes_masks_that_spans_cannot_express(calls: Counter[str]) -> None:
    stock, fused = models("llama", as_one=True)
    ids = ids_of(2, 12)
    for hidden in (5, slice(3, 6)):
        mask = torch.ones_like(ids)
        mask[1, hidden] = 0
        calls.clear()
        seen = mask.bool()
        got, wanted = run(fused, ids, mask, (12,))[0], run(stock, ids, mask, (12,))[0]
        assert distance(got[seen], wanted[seen]) < 1e-5
        assert not calls["decoder_layers"]
        assert calls["feed_half"] == LAYERS


def causal(queries: int, tokens: int, first: int = 0) -> Tensor:
    columns = torch.arange(tokens)
    limit = torch.arange(tokens - queries, tokens)[:, None]
    return ((columns <= limit) & (columns >= first) & (limit >= first))[None, None]


@pytest.mark.parametrize(("queries", "tokens", "first"), [(1, 1, 0), (1, 9, 4), (5, 5, 0), (5, 9, 2), (4, 7, 5)])
def test_spans_are_read_from_a_mask(queries: int, tokens: int, first: int) -> None:
    mask = torch.cat([causal(queries, tokens, first), causal(queries, tokens)])
    spans = spans_of(mask, 2, queries)
    assert spans is not None
    padding = max(0, first - (tokens - queries))
    assert spans.tolist() == [[0, first, tokens, padding, queries - padding], [1, 0, tokens, queries, queries]]
    for row in range(queries):
        for column in range(tokens):
            other = mask.clone()
            other[1, 0, row, column] ^= True
            changed = spans_of(other, 2, queries)
            if changed is not None:  # the changed mask is causal, too
                begin = int(changed[1, 1])
                assert torch.equal(other[1:], causal(queries, tokens, begin))


def test_attention_that_looks_ahead_is_left_to_torch(calls: Counter[str]) -> None:
    _, fused = models("llama", as_one=True)
    for layer in fused.model.layers:
        layer.self_attn.is_causal = False
    run(fused, ids_of(1, 8), torch.ones(1, 8, dtype=torch.long), (7, 1))
    assert calls["decoder_layers"] == 1, "only the single token runs in C"
