"""Makes a backward pass through a parallelized model an error in words: the workers compute without gradients."""

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
    """Give the loss, and in training mode every output, a backward that refuses.

    Outside of training mode the other outputs stay as they are: they are seldom trained on, and `numpy()` refuses
    tensors that require gradients.
    """
    if torch.is_grad_enabled():
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and (model.training or leaf.dim() == 0):
                _NoGradients.apply(anchor, leaf, type(model).__name__)
    return output
