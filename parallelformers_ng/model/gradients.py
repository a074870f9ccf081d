"""Says in words that the workers compute without gradients, where a training step would ask for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from parallelformers_ng.errors import ParallelError


class _NoGradients(torch.autograd.Function):
    """The identity, with a backward that refuses."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, output: torch.Tensor, name: str) -> torch.Tensor:
        ctx.mark_dirty(output)  # the very tensor goes on, wherever an output holds it
        ctx.name = name
        return output

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ParallelError(
            f"{ctx.name} is parallelized, which rules out training: the workers compute without gradients. Call"
            " deparallelize() first"
        )


def refuse_gradients(model: nn.Module, output: Any) -> Any:
    """Let the loss, and in training mode every output, know whom to blame where it is asked for gradients.

    Outside of training mode nothing but a loss does: what is computed with outputs there is seldom meant to be trained,
    and may be turned into an array as it is.
    """
    if torch.is_grad_enabled():
        anchor = torch.empty(0, requires_grad=True)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and (model.training or leaf.dim() == 0):
                _NoGradients.apply(anchor, leaf, type(model).__name__)
    return output
