"""A tiny model of the zoo, and common inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

VOCABULARY = 131  # a prime: it divides by no world size


@dataclass(frozen=True)
class Case:
    """One tiny model.

    Attributes:
        name: for test ids.
        make: builds the model.
        inputs: builds the keyword arguments of its forward.
        generates: whether `generate` is part of the check.
        at_odds: why the installed transformers does not generate right from the model whole; "" where it does.
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
