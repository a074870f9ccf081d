"""Tests that torch.jit.trace of a parallelized model ends in words."""

from __future__ import annotations

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError
from tests.zoo.decoders import gpt2


def test_a_trace_is_refused(groups) -> None:
    model = parallelize(gpt2(), workers=groups(2))
    try:
        with pytest.raises(ParallelError, match=r"torch\.jit\.trace"):
            torch.jit.trace(model, torch.tensor([[3, 4]]), strict=False)
        assert model(torch.tensor([[3, 4]])).logits.shape[:2] == (1, 2)
    finally:
        model.deparallelize()
