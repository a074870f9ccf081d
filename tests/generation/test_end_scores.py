"""Tests `min_length` and `min_new_tokens` in workers: same scores as transformers, without a mask of all ids."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor

from parallelformers_ng.generation.end_scores import forbid_ends_by_index
from tests.helpers.operator_recorder import Tape

PROCESSORS: dict[str, Any] = {
    "min_length": lambda ends: MinLengthLogitsProcessor(4, ends),
    "min_new_tokens": lambda ends: MinNewTokensLengthLogitsProcessor(1, 3, ends),
}
ENDS: dict[str, Any] = {
    "one": 2,
    "several": [0, 6],
    "outside of the vocabulary": [-1, 3, 7],
    "none in the vocabulary": [9],
    "a scalar tensor": torch.tensor(5),
    "int32": torch.tensor([1], dtype=torch.int32),
}


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
        monkeypatch.setattr(cls, "__call__", inspect.unwrap(cls.__call__))


@pytest.mark.parametrize("make", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("length", [3, 4])
def test_same_scores_as_transformers(make: Any, ends: Any, length: int) -> None:
    processor, ids = make(ends), torch.zeros(2, length, dtype=torch.int64)
    scores = torch.randn(2, 3, 7)[:, 1]
    expected, before = processor(ids, scores), scores.clone()
    forbid_ends_by_index()
    result = processor(ids, scores)
    assert torch.equal(result, expected)
    assert torch.equal(scores, before)
    assert result.untyped_storage().data_ptr() != scores.untyped_storage().data_ptr()


def test_no_mask_of_the_vocabulary() -> None:
    processor = PROCESSORS["min_new_tokens"](2)
    forbid_ends_by_index()
    with torch.inference_mode(), (tape := Tape()):
        processor(torch.zeros(1, 2, dtype=torch.int64), torch.randn(1, 7))
    assert not {torch.ops.aten.isin.Tensor_Tensor, torch.ops.aten.arange.default} & {call[0] for call in tape._calls}


def test_second_call_changes_nothing() -> None:
    forbid_ends_by_index()
    first = MinLengthLogitsProcessor.__call__
    forbid_ends_by_index()
    assert MinLengthLogitsProcessor.__call__ is first
