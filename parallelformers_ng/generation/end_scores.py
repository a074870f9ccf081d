"""Forbids end tokens before the smallest length without a mask of the whole vocabulary.

With `min_length` or `min_new_tokens`, transformers compares every id of the vocabulary with the end tokens, for every
row of logits. A step with prompt lookup processes a row for each proposed token, and another row to check the proposal:
for 8 proposals and 49,152 ids, these comparisons took a third of the step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor


def forbid_ends_by_index() -> None:
    """Make this process write only the scores of the end tokens, from now on. Idempotent."""
    for processor, is_short in (
        (MinLengthLogitsProcessor, lambda self, length: length < self.min_length),
        (
            MinNewTokensLengthLogitsProcessor,
            lambda self, length: length - self.prompt_length_to_skip < self.min_new_tokens,
        ),
    ):
        if not hasattr(processor.__call__, "__wrapped__"):
            processor.__call__ = _by_index(processor.__call__, is_short)


def _by_index(usual: Callable[..., Tensor], is_short: Callable[[Any, int], bool]) -> Callable[..., Tensor]:
    """Return a version of a processor's `__call__` that computes the same scores.

    Args:
        usual: the method of transformers, for scores on a device.
        is_short: whether a processor forbids the end tokens after so many tokens.
    """

    @functools.wraps(usual)
    def call(self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
        ends = self.eos_token_id
        if not scores.is_cpu or ends.dtype is not torch.int64:
            return usual(self, input_ids, scores)
        if not is_short(self, input_ids.shape[-1]):
            return scores.clone()
        return scores.index_fill(-1, ends[(ends >= 0) & (ends < scores.shape[-1])], -math.inf)

    return call
