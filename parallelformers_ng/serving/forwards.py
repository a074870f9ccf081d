"""Runs a model's forward pass over texts, in batches of similar length."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from parallelformers_ng.serving.engine import Engine

_TOKENS_AT_ONCE = 4096  # maximum number of tokens in one forward pass, padding included


def run_rows(
    engine: Engine,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    longest: int,
    read: Callable[[Any, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, int]:
    """Run the model over texts and return one result row for each text.

    A forward pass has at most 4096 tokens including padding, or one longer text. A model without a pad token runs one
    text at a time. The function blocks the calling thread.

    Args:
        engine: engine of the model.
        tokenizer: tokenizer that pads the batches on the right.
        rows: the tokenizer's output for each text, without padding; at least one text.
        longest: maximum number of tokens in a text.
        read: function of the model's output and the attention mask, int64 `[batch, tokens]`; returns the result rows
            `[batch, …]`, of any data type.

    Returns:
        Result rows `[texts, …]` in the order of the texts, and the total number of tokens without padding.

    Raises:
        ApiError: a text is empty, longer than `longest`, or has an unknown token, status 400.
        ParallelError: the workers cannot answer.
    """
    inputs = inspect.signature(engine.model.forward).parameters
    sizes = [len(row["input_ids"]) for row in rows]
    for row in rows:
        engine.check_prompt(row["input_ids"], longest)
    order = sorted(range(len(rows)), key=lambda index: sizes[index])
    outputs: dict[int, torch.Tensor] = {}
    # A decoder with a classification head finds the last token of each row by the pad token id.
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
