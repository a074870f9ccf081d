"""Answers requests with a model's forward pass over texts, in batches of similar length."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.engine import Engine

_Text = TypeVar("_Text", str, tuple[str, str])
_TOKENS_AT_ONCE = 4096  # maximum number of tokens in one forward pass, padding included


async def run_texts(
    engine: Engine,
    tokenizer: Any,
    texts: Sequence[_Text],
    encode: Callable[[_Text], Mapping[str, Any]],
    longest: int,
    read: Callable[[Any, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, int]]:
    """Run the model over texts or pairs of texts, and return one result row for each.

    A forward pass has at most 4096 tokens including padding, or one longer text. A model without a pad token runs one
    text at a time.

    Args:
        engine: engine of the model.
        tokenizer: tokenizer that pads the batches on the right.
        texts: texts or pairs of texts.
        encode: function that returns the tokenizer's output for one text, without padding.
        longest: maximum number of tokens in a text.
        read: function of the model's output and the attention mask, int64 `[batch, tokens]`; returns the result rows
            `[batch, …]`, of any data type.

    Returns:
        Result rows `[texts, …]` in the order of the texts, and the field `usage` of the answer.

    Raises:
        ApiError: the texts are too many, or none. Or a text is empty, longer than `longest`, or has an unknown token,
            status 400. Or no place is free, status 503.
        ParallelError: the workers cannot answer.
    """
    if not 0 < len(texts) <= engine.options.max_inputs:
        raise bad_request(
            f"the request has {len(texts)} texts or pairs of texts; send 1 to {engine.options.max_inputs}"
            " (--max-inputs)",
            "input",
        )
    with engine.admitted(1):
        results, tokens = await asyncio.to_thread(
            lambda: _run_rows(engine, tokenizer, [encode(text) for text in texts], longest, read)
        )
    engine.metrics.took(tokens)
    return results, {"prompt_tokens": tokens, "total_tokens": tokens}


def _run_rows(
    engine: Engine,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    longest: int,
    read: Callable[[Any, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, int]:
    """Return the result rows of encoded texts, and the total number of tokens without padding."""
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
