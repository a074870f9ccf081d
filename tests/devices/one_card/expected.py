"""Computes with plain models what parallelized models must return."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.case import VOCABULARY


def without_ties(whole: Any, tokens: int, rows: int = 2, length: int = 7, beams: int = 1) -> tuple[Any, torch.Tensor]:
    """Return inputs, and the plain model's greedy tokens, or tokens of a beam search.

    No greedy token was a close decision, because ranks round sums otherwise than one process.
    """
    scored = {"max_new_tokens": tokens, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    for seed in range(200):
        ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        output = whole.generate(**inputs, **scored)
        best, second = torch.stack(output.scores).topk(2).values.unbind(-1)
        if (best - second).min() > 1e-2:
            more = {"max_new_tokens": tokens, "do_sample": False, "num_beams": beams}
            return inputs, output.sequences if beams == 1 else whole.generate(**inputs, **more)
    raise AssertionError("each prompt has a close decision")


def greedy(model: Any, inputs: Any, tokens: int, **more: Any) -> torch.Tensor:
    """Return the greedy tokens of a model."""
    return model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **more)
