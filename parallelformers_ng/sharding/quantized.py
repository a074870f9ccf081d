"""Defines modules with quantized weights."""

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
    """A module with quantized weights. Each read of a weight dequantizes it again; no dequantized tensor is kept."""

    # name of a parameter → (its encoding, the data type to dequantize to)
    encodings: Mapping[str, tuple[Encoding, torch.dtype]]

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)  # `nn.Module.__getattr__` looks up parameters
        if name not in self.__dict__.get("encodings", ()):
            return value
        stack = ExpertStack(value, self.__dict__["_parameters"][name + SCALE], *self.encodings[name])
        return stack if value.ndim == 3 else stack.whole()


class ExpertStack:
    """The quantized weights of stacked experts: `stack[i]` dequantizes expert i, any attribute all experts."""

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
    """A linear layer with a quantized weight."""


class QuantizedEmbedding(Quantized):
    """An embedding with a quantized table. A look-up dequantizes only the rows that it reads.

    `forward` takes ids `[…]` of an integer type, and returns vectors `[…, width]` in the data type of `encodings`.
    """

    def forward(self, input: Tensor) -> Tensor:
        encoding, dtype = self.encodings["weight"]
        parts: Any = self._parameters
        return encoding.decode(parts["weight"][input], parts["weight" + SCALE][input], dtype)


def quantize_modules(model: nn.Module, plan: ShardPlan) -> None:
    """Turn modules into quantized modules, in place, as the plan says, before the weights are loaded.

    New parameters are on `meta`, in the shapes of the whole tensors.
    """
    for name, encoding in plan.quantized.items():
        path, _, short = name.rpartition(".")
        numbers, scales = (torch.empty(p.shape, dtype=p.dtype, device="meta") for p in plan.parts(name))
        hold(model.get_submodule(path), short, encoding, numbers, scales, plan.tensors[name].dtype)


def hold(module: Any, name: str, encoding: Encoding, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    """Replace one parameter of a module by quantized numbers and scales, and make the module a `Quantized`."""
    if not isinstance(module, Quantized):
        cls: type = type(module)
        module.__class__ = _mixed(QuantizedEmbedding if cls is nn.Embedding else Quantized, cls)
        module.encodings = {}
        if takes_experts_one_by_one(module):  # only transformers' "eager" experts read the weights expert by expert
            set_attribute(module, "config._experts_implementation", "eager")
    module.encodings = {**module.encodings, name: (encoding, dtype)}
    for part, values in ((name, numbers), (name + SCALE, scales)):
        module._parameters[part] = nn.Parameter(values, requires_grad=False)


@cache
def _mixed(kind: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    if cls is nn.Linear:
        return QuantizedLinear
    return type(f"Quantized{cls.__name__}", (kind, cls), {"__module__": cls.__module__})
