"""Runs the decode steps of models without a cache: every step runs each whole sequence from its first token."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from parallelformers_ng.batching.prepared import inputs_of
from parallelformers_ng.batching.row import BatchRow
from parallelformers_ng.errors import BatchingError


def runs_whole(model: Any, row: BatchRow) -> bool:
    """Return whether a decode step of a model runs the whole sequence, because the model has no cache."""
    longer = torch.cat((row.ids, row.ids[:, -1:]), -1)
    whole = bool(_inputs(model, row, longer)["input_ids"].shape[1] > row.ids.shape[1])
    if not whole and row.cache is None:
        raise BatchingError("rows cannot be added to the cache of this model")
    return whole


def whole_logits(model: Any, rows: list[BatchRow]) -> torch.Tensor:
    """Logits of each sequence's last token, `[rows, vocabulary]`. Whole sequences run together, with padding after the
    shorter sequences; no token attends to the padding."""
    inputs = [_inputs(model, row, row.ids) for row in rows]
    lengths = [each["input_ids"].shape[1] for each in inputs]
    padding = model.config.get_text_config().pad_token_id
    joint = dict(inputs[0])
    for name, value in joint.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.shape != (1, lengths[0]):
            raise BatchingError(f"the model's argument {name} cannot be padded")
        behind = padding or 0 if name == "input_ids" else 0
        padded = (
            pad(each[name], (0, max(lengths) - length), value=behind)
            for each, length in zip(inputs, lengths, strict=True)
        )
        joint[name] = torch.cat(list(padded))
    logits = model(**joint, return_dict=True).logits
    return logits[range(len(rows)), [length - 1 for length in lengths]]


def _inputs(model: Any, row: BatchRow, ids: torch.Tensor) -> dict[str, Any]:
    arguments = {
        name: value for name, value in row.call.model_kwargs.items() if name not in ("position_ids", "logits_to_keep")
    }
    new = ids.shape[1] - row.prompt_mask.shape[1]
    mask = pad(row.prompt_mask, (0, new), value=1)
    if arguments.get("attention_mask") is not None:
        arguments["attention_mask"] = mask
    steps = {"next_sequence_length": 1} if new and arguments.get("use_cache") else {}
    return inputs_of(model, ids, (mask.cumsum(-1) - 1).clamp(min=0), is_first_iteration=not new, **steps, **arguments)
