"""Builds tiny models with random parameters, and their inputs, without downloads.

Biases of zero and norms of one hide mistakes: a bias added on each rank, a norm applied twice. So after the constructor
every floating-point parameter and persistent buffer gets new random values.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PreTrainedModel


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every floating-point parameter from a distribution wide enough that greedy tokens differ clearly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
            else:
                parameter.copy_(parameter + 0.3 * noise)
    return model


def build(cls: type[PreTrainedModel], config: object, seed: int = 0, attention: str = "sdpa") -> PreTrainedModel:
    """Return a random model of class `cls` in evaluation mode."""
    torch.manual_seed(seed)
    model = cls._from_config(config, attn_implementation=attention)
    randomise(model, seed)
    return model.eval()


def largest_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest absolute difference, relative to the largest finite absolute value wanted; infinite if
    non-finite values differ."""
    finite = want.isfinite()
    if not torch.equal(got[~finite], want[~finite]):
        return math.inf
    if not finite.any():
        return 0.0
    return ((got - want)[finite].abs().max() / want[finite].abs().max().clamp_min(1e-12)).item()
