"""Makes a backward pass through a parallelized model raise a clear error: the workers compute without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from parallelformers_ng.errors import ParallelError


class _NoGradients(torch.autograd.Function):
    """The identity function, with a backward pass that raises ParallelError."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, output: torch.Tensor, name: str) -> torch.Tensor:
        ctx.mark_dirty(output)  # the same tensor object is returned, so the output keeps it
        ctx.name = name
        return output

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ParallelError(
            f"{ctx.name} is parallelized and does not support training: the workers compute without gradients. Call"
            " deparallelize() first"
        )


def refuse_gradients(model: nn.Module, output: Any) -> Any:
    """Make the backward pass of the loss, and in training mode of every output, raise ParallelError.

    Outside of training mode only scalar outputs raise the error: larger outputs are seldom trained on, and `numpy()`
    refuses tensors that require gradients. Only floating-point tensors are changed, and only if gradients are enabled
    in this thread.

    Args:
        model: the parallelized model.
        output: output of a call; its tensors are changed in place.

    Returns:
        `output` itself.
    """
    if torch.is_grad_enabled():
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and (model.training or leaf.dim() == 0):
                _NoGradients.apply(anchor, leaf, type(model).__name__)
    return output
