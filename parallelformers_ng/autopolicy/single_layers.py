"""Finds layers that no inputs of the model reach, and makes inputs for each layer alone.

A layer qualifies only if the modelling code does nothing with the layer except calls (`sharding/layer_uses.py`).
With gathered outputs, such a column-parallel layer has the same outputs as a whole layer in every model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.sharding.experts import has_experts_interface
from parallelformers_ng.sharding.layer_uses import is_only_called, reads_parameters
from parallelformers_ng.sharding.structure import uses

_ROWS = 6


def single_layers(model: nn.Module, reached: set[str], seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    generator = torch.Generator().manual_seed(seed)
    used = uses(model)
    for path, module in model.named_modules():
        if path in reached or any(used[id(p)] > 1 for p in module._parameters.values() if p is not None):
            continue
        inputs = _inputs(module, generator)
        if inputs is None:
            continue
        if is_only_called(model, path) or (has_experts_interface(module) and not reads_parameters(model, path)):
            yield path, inputs


def _inputs(module: Any, generator: torch.Generator) -> dict[str, Any] | None:
    """Return inputs for a layer of a known class; None for any other class, also for subclasses of known classes."""
    if type(module) is nn.Linear:
        return {"input": _randn(_ROWS, module.in_features, module.weight, generator)}
    if type(module) is Conv1D:
        return {"x": _randn(_ROWS, module.nx, module.weight, generator)}
    if type(module) is nn.Embedding and module.max_norm is None:
        return {"input": torch.randint(0, module.num_embeddings, (_ROWS,), generator=generator)}
    if has_experts_interface(module):
        down = module.down_proj
        width = down.shape[2] if getattr(module, "is_transposed", False) else down.shape[1]
        return {
            "hidden_states": _randn(_ROWS, width, down, generator),
            "top_k_index": torch.randint(0, down.shape[0], (_ROWS, 2), generator=generator),
            "top_k_weights": torch.rand(_ROWS, 2, generator=generator).to(down.dtype),
        }
    return None


def _randn(rows: int, width: int, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(like.dtype)
