"""Makes gradients of a parallelized model raise a clear error: the workers compute without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from parallelformers_ng.errors import ParallelError


class _NoGradients(torch.autograd.Function):
    """The identity function of an output, with a backward pass that raises ParallelError."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, name: str, *_: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(output)  # the same tensor object is returned, so the output keeps it
        ctx.name = name
        return output

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ParallelError(
            f"{ctx.name} is parallelized and does not support training: the workers compute without gradients. Call"
            " deparallelize() first"
        )


def refuse_gradients(model: nn.Module, output: Any, inputs: Any) -> Any:
    """Make the backward pass of an output raise ParallelError.

    As in the plain model, an output requires a gradient if gradients are enabled in this thread, and a weight or an
    input requires one. Only floating-point tensors are changed.
    """
    if torch.is_grad_enabled():
        sources = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if any(parameter.requires_grad for parameter in model.parameters()):
            sources.append(torch.empty(0, device="cpu", requires_grad=True))
        for leaf in tree_leaves(output) if sources else ():
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                _NoGradients.apply(leaf, type(model).__name__, *sources)
    return output
