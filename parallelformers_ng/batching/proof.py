"""Whether calls of a model may be decoded together: each must give what it gives alone. Tried on a small copy."""

from __future__ import annotations

from typing import Any

import torch

from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.prompts import Prompts
from parallelformers_ng.batching.row import Row
from parallelformers_ng.batching.rows import Rows
from parallelformers_ng.errors import UnsupportedModelError

PROMPTS = ((3, 9), (5, 6), (3, 12), (7, 5), (12, 8))
"""Calls of the proof, tokens before and after: they join one after another, and leave in another order."""
_PIECE = 10


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
    rows, prompts, met = Rows(model), Prompts(model), list[Row]()
    for number, call in enumerate(calls):
        met.append(Row(number, prepare(model, call)))
        prompts.add(met[-1])
        if not number:
            continue  # the first two run side by side, the last in pieces
        while len(prompts):
            if ran := prompts.run(_PIECE):
                rows.join(ran.rows, ran.logits, ran.cache, ran.mask)
            if len(rows):
                rows.step()
    while len(rows):
        rows.step()
    return [row.ids for row in met]
