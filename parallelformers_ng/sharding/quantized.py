"""Modules on a rank whose weights are held in few bits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from parallelformers_ng.sharding.attributes import set_attribute
from parallelformers_ng.sharding.encoding import SCALE, Encoding
from parallelformers_ng.sharding.experts import takes_experts_one_by_one
from parallelformers_ng.sharding.plan import ShardPlan


class Quantized(nn.Module):
    """A module that computes with its weights as they were before: whoever reads one gets its numbers, put together
    then and let go afterwards.

    Attributes:
        encodings: name of a parameter → its encoding, and the data type that readers see.
    """

    encodings: Mapping[str, tuple[Encoding, torch.dtype]]

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)  # torch looks parameters up there
        if name not in self.__dict__.get("encodings", ()):
            return value
        stack = ExpertStack(value, self.__dict__["_parameters"][name + SCALE], *self.encodings[name])
        return stack if value.ndim == 3 else stack.whole()


class ExpertStack:
    """The weights of many experts, put together one by one as they are asked for."""

    def __init__(self, numbers: Tensor, scales: Tensor, encoding: Encoding, dtype: torch.dtype) -> None:
        self._parts = numbers, scales
        self._encoding = encoding
        self._dtype = dtype

    def whole(self) -> Tensor:
        return self._encoding.decode(*self._parts, self._dtype)

    def __getitem__(self, index: Any) -> Tensor:
        numbers, scales = (part[index] for part in self._parts)
        return self._encoding.decode(numbers, scales, self._dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)


class QuantizedLinear(Quantized, nn.Linear):
    """A linear layer, with no more of its weight in high precision at a time than it takes."""


class QuantizedEmbedding(Quantized):
    """An embedding that puts together the rows that are looked up, and no others."""

    def forward(self, input: Tensor) -> Tensor:
        encoding, dtype = self.encodings["weight"]
        parts: Any = self._parameters
        return encoding.decode(parts["weight"][input], parts["weight" + SCALE][input], dtype)


def quantize_modules(model: nn.Module, plan: ShardPlan) -> None:
    """Change the modules of a rank, still without weights, into the quantized ones of the plan."""
    for name, encoding in plan.quantized.items():
        path, _, short = name.rpartition(".")
        numbers, scales = (torch.empty(p.shape, dtype=p.dtype, device="meta") for p in plan.parts(name))
        hold(model.get_submodule(path), short, encoding, numbers, scales, plan.tensors[name].dtype)


def hold(module: Any, name: str, encoding: Encoding, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    """Have a module hold one of its parameters as small numbers and scales.

    Args:
        dtype: the data type that it has for those who read it.
    """
    if not isinstance(module, Quantized):
        cls: type = type(module)
        module.__class__ = _mixed(QuantizedEmbedding if cls is nn.Embedding else Quantized, cls)
        module.encodings = {}
        if takes_experts_one_by_one(module):  # the only way to compute experts that asks for one after another
            set_attribute(module, "config._experts_implementation", "eager")
    module.encodings = {**module.encodings, name: (encoding, dtype)}
    for part, values in ((name, numbers), (name + SCALE, scales)):
        module._parameters[part] = nn.Parameter(values, requires_grad=False)


@cache
def _mixed(kind: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    if cls is nn.Linear:
        return QuantizedLinear
    return type(f"Quantized{cls.__name__}", (kind, cls), {"__module__": cls.__module__})
