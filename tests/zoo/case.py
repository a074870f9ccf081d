"""Describes the tiny models of the zoo, and makes inputs for most of these models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

VOCABULARY = 131  # a prime: no world size divides it


@dataclass(frozen=True)
class Case:
    """A tiny model of the zoo.

    Attributes:
        name: name in test ids.
        make: function that builds the model.
        inputs: function that builds the keyword arguments of its forward.
        generates: whether `generate` is part of the check.
        at_odds: reason why the installed transformers generates wrongly with the whole model; "" if it does not.
    """

    name: str
    make: Callable[[], PreTrainedModel]
    inputs: Callable[[], dict[str, Any]]
    generates: bool = False
    at_odds: str = ""


def token_ids(rows: int = 2, length: int = 7, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def text_inputs() -> dict[str, Any]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0
    return {"input_ids": token_ids(), "attention_mask": mask}


def seq2seq_inputs() -> dict[str, Any]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": token_ids(), "attention_mask": mask, "decoder_input_ids": token_ids(length=4, seed=2)}


def image_inputs(size: int = 16) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(3))}
