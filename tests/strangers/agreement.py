"""Compares models with their reference: the results of the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests.zoo.build import largest_difference

NEW_TOKENS = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


def prompt(tokens: int = 20, seed: int = 1) -> torch.Tensor:
    """Return random ids, `[1, tokens]`."""
    return torch.randint(5, 95, (1, tokens), generator=torch.Generator().manual_seed(seed))


def assert_agree(cut: Any, whole: Any, ids: torch.Tensor, **options: Any) -> None:
    """Compare logits and the tokens of `generate` between two models."""
    with torch.no_grad():
        assert largest_difference(cut(ids).logits, whole(ids).logits) < 1e-4
    assert cut.generate(ids, **NEW_TOKENS, **options).tolist() == whole.generate(ids, **NEW_TOKENS, **options).tolist()


def assert_agree_in_a_batch(cut: Any, whole: Any, prompts: Sequence[torch.Tensor]) -> None:
    """Compare the tokens of concurrent callers with those of the plain model."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        tokens_of_callers = [*threads.map(lambda ids: cut.generate(ids, **NEW_TOKENS).tolist(), prompts)]
    assert tokens_of_callers == [whole.generate(ids, **NEW_TOKENS).tolist() for ids in prompts]
