"""Reads and sets parameters and buffers of a module by their dotted names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def dotted(path: str, name: str) -> str:
    """Join a path and a name by a dot; the path or the name may be empty."""
    return f"{path}.{name}".strip(".")


def is_within(path: str, other: str) -> bool:
    """Return whether `path` equals `other` or is beneath `other`; every path is beneath ""."""
    return f"{path}.".startswith(f"{other}." if other else "")


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of a model by name; a tied tensor appears under each of its names."""
    buffers = model.named_buffers(remove_duplicate=False)
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(buffers)}


def owned_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield the name, the tensor, and whether it is a buffer, for each of a module's own parameters and buffers."""
    for table, is_buffer in ((module._parameters, False), (module._buffers, True)):
        for name, tensor in table.items():
            if tensor is not None:
                yield name, tensor, is_buffer


def get_tensor(model: nn.Module, name: str, is_buffer: bool) -> torch.Tensor:
    """Return the parameter or buffer `name` as the model stores it; on a rank, this is the rank's shard."""
    owner, short = _owner(model, name)
    tensor = (owner._buffers if is_buffer else owner._parameters)[short]
    assert tensor is not None, f"{name} is None"
    return tensor


def set_tensor(model: nn.Module, name: str, tensor: torch.Tensor, is_buffer: bool) -> None:
    """Set a parameter or buffer without a check of shape and data type; a new parameter is an `nn.Parameter`."""
    owner, short = _owner(model, name)
    if not is_buffer and not isinstance(tensor, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=False)
    table: dict[str, Any] = owner._buffers if is_buffer else owner._parameters
    table[short] = tensor


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has the tensor `name`, and the tensor's name in that module.

    `get_submodule` would take several times as long, and a start asks for each tensor seven times.
    """
    *path, short = name.split(".")
    owner: Any = model
    for part in path:
        owner = owner._modules[part]
    return owner, short
