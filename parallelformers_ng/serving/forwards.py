"""Texts through a model without an answer of text: in batches of like lengths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from parallelformers_ng.serving.engine import Engine

_TOKENS_AT_ONCE = 4096  # of one forward, padding included


def run_rows(
    engine: Engine,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    longest: int,
    read: Callable[[Any, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, int]:
    """Return what is read out of the model's outputs, a row for each text, and how many tokens the texts have.

    Args:
        engine: the model.
        tokenizer: its tokenizer, which pads.
        rows: the tokenizer's output for each text.
        longest: most tokens of a text.
        read: maps an output and the mask `[rows, tokens]` of its inputs to rows.

    Raises:
        ApiError: a text is longer.
    """
    inputs = inspect.signature(engine.model.forward).parameters
    sizes = [len(row["input_ids"]) for row in rows]
    for row in rows:
        engine.check_prompt(row["input_ids"], longest)
    order = sorted(range(len(rows)), key=lambda index: sizes[index])
    outputs: dict[int, torch.Tensor] = {}
    # A decoder with a head for classes finds the last token of a row by its padding.
    most_rows = len(rows) if engine.model.config.get_text_config().pad_token_id is not None else 1
    more = {"use_cache": False} if "use_cache" in inputs else {}
    while order:
        count = min(len(order), max(1, _TOKENS_AT_ONCE // sizes[order[-1]]), most_rows)
        batch = [order.pop() for _ in range(count)]
        padded = tokenizer.pad(
            [{name: rows[index][name] for name in rows[index] if name in inputs} for index in batch],
            padding_side="right",
            return_tensors="pt",
        )
        outputs.update(zip(batch, read(engine.model(**padded, **more), padded["attention_mask"]), strict=True))
    return torch.stack([outputs[index] for index in range(len(rows))]), sum(sizes)
