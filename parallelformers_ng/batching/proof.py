"""Whether calls of a model may be decoded together: each must give what it gives alone. Tried on a small copy."""

from __future__ import annotations

from typing import Any

import torch

from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.rows import Row, Rows
from parallelformers_ng.errors import UnsupportedModelError

PROMPTS = ((5, 9), (9, 6), (3, 12), (7, 5), (12, 8))
"""Calls of the proof, tokens before and after: they join one after another, and leave in another order."""


def prove(cls: Any, config: Any) -> str:
    """Why calls of models of this class and configuration run one after another, "" where they may share a batch."""
    if config.is_encoder_decoder:
        return "it has an encoder"
    try:
        twin = make_twin(cls, config)
    except UnsupportedModelError as error:
        return str(error)
    return why_alone(twin.model)


def why_alone(model: Any) -> str:
    """Why calls of such a model run one after another, "" where they may share a batch.

    Args:
        model: a small random model on CPU; see `autopolicy.twin_making`.
    """
    words = model.config.get_text_config().vocab_size
    numbers = torch.Generator().manual_seed(1)
    calls: list[dict[str, Any]] = [
        {
            "input_ids": torch.randint(0, words, (1, before), generator=numbers),
            "max_new_tokens": after,
            "min_new_tokens": after,
            "do_sample": False,
        }
        for before, after in PROMPTS
    ]
    try:
        with torch.inference_mode():
            alone = [model.generate(**call) for call in calls]
            together = _together(model, calls)
    except Exception as error:  # whatever a model of a kind of its own raises
        return f"{type(error).__name__}: {error}"
    different = sum(not torch.equal(*pair) for pair in zip(alone, together, strict=True))
    return f"{different} of {len(calls)} sequences have other tokens than alone" if different else ""


def _together(model: Any, calls: list[dict[str, Any]]) -> list[torch.Tensor]:
    rows, met = Rows(model), list[Row]()
    for number, call in enumerate(calls):
        met.append(rows.join(number, prepare(model, call), None))
        rows.step()
    while len(rows):
        rows.step()
    return [row.ids for row in met]
