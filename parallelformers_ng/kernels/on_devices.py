"""Computes parts of a decode step on a device with fewer kernels and less memory traffic than the modelling code."""

# | part | here | modelling code of transformers 5.17 |
# | --- | --- | --- |
# | norm with known code | 1 kernel | 7 or 8 kernels |
# | 8-bit weight with a scale for each output | 5 bytes: 1 read, 2 written, 2 read | 13 bytes; fp8: 21 bytes |
# | attention of one query with a mask | reads keys and values in the cache | copies both for each query head |
#
# The original modules compute if gradients, autocast or `torch.compile` are on, for foreign code, and for other data
# types. Each part is compared with the modelling code before its first use, see `recognition.agree`. The numbers of
# kernels and bytes were counted on a stand-in for a device. No time was measured on a GPU.

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from parallelformers_ng.cuda_graphs.masks import added
from parallelformers_ng.kernels.operators import may_serve
from parallelformers_ng.kernels.recognition import agree, fused_norm, mixed
from parallelformers_ng.kernels.sdpa import with_single_queries
from parallelformers_ng.sharding.encoding import SCALE
from parallelformers_ng.sharding.quantized import QuantizedLinear

# Products with unscaled 8-bit weights are larger than with scaled ones; float16, up to 65504, could overflow.
_WIDE = (torch.float32, torch.bfloat16)


class _DeviceNorm(nn.Module):
    """A norm that one kernel of torch, the function `fused`, computes; mixed into the class of the norm."""

    variance_epsilon: float
    fused: Callable[..., Tensor]

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        if weight is None or not _fits(hidden_states, weight):
            return super().forward(hidden_states)
        return self.fused(hidden_states, weight.shape, weight, eps=self.variance_epsilon)


class DeviceRMSNorm(_DeviceNorm):
    fused = staticmethod(functional.rms_norm)


class DeviceLayerNorm(_DeviceNorm):
    fused = staticmethod(functional.layer_norm)


_NORMS: dict[str, type[_DeviceNorm]] = {"rms_norm": DeviceRMSNorm, "layer_norm": DeviceLayerNorm}


class DeviceQuantizedLinear(QuantizedLinear):
    """A linear layer with 8-bit weights Q that scales outputs instead of weights: y = (x Qᵀ) ⊙ s + b.

    `QuantizedLinear` computes if s does not have one scale for each output, or if x is neither float32 nor bfloat16.
    """

    def forward(self, input: Tensor) -> Tensor:
        encoding, dtype = self.encodings["weight"]
        numbers, scales = self._parameters["weight"], self._parameters["weight" + SCALE]
        assert numbers is not None
        assert scales is not None
        if (
            not encoding.has_scale_per_output(scales)
            or dtype not in _WIDE
            or input.dtype is not dtype
            or not _serves(input)
        ):
            return super().forward(input)
        return _scaled_product(input, numbers, scales, self._parameters["bias"])


def _scaled_product(input: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    output = functional.linear(input, numbers.to(input.dtype)).mul_(scales.flatten())
    return output if bias is None else output.add_(bias)


def _fits(hidden: Tensor, weight: Tensor) -> bool:
    return hidden.dtype is weight.dtype and hidden.shape[-1:] == weight.shape and _serves(hidden)


def _serves(input: Tensor) -> bool:
    return not (input.is_cpu or input.is_meta) and may_serve(input.device.type)


def install(model: nn.Module, left: Collection[str] = ()) -> None:
    """Change the classes of norms and quantized layers that need fewer kernels here than in the modelling code. A
    comparison of the results comes first.

    Args:
        model: model of a rank on a device; its tensors may still be missing.
        left: paths of modules that keep their class, because other code reads their parameters as attributes.
    """
    for path, module in model.named_modules():
        cls: Any = type(module)
        if path in left:
            continue
        if cls is QuantizedLinear:
            if _product_agrees():
                module.__class__ = DeviceQuantizedLinear
            continue
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 1 and (name := fused_norm(cls)) and _norm_agrees(cls, name):
            kernel: Any = _NORMS[name]
            module.__class__ = mixed(kernel, cls)


def install_attention() -> None:
    """Let transformers' "sdpa" attention read keys and values in the cache without copies, for all models of this
    process. A comparison of the results comes first."""
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not hasattr(usual, "__wrapped__") and _attention_agrees(usual):
        ALL_ATTENTION_FUNCTIONS.register("sdpa", with_packed_queries(usual))


def with_packed_queries(attention: Any) -> Any:
    """Wrap an attention function of transformers, so that a single query needs no copies of keys and values.

    The query heads that share a key/value head become several queries of that head. All heads must share one mask.
    """
    return with_single_queries(attention, _packs, _attend)


def _packs(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    if mask is None or not _serves(query):
        return False
    batch, heads, *_ = query.shape
    return (
        heads == key.shape[1] * getattr(module, "num_key_value_groups", 1) > 0
        and key.shape[0] == batch
        and value.shape[:3] == key.shape[:3]
        and mask.ndim == 4
        and mask.shape[0] in (1, batch)
        and mask.shape[1] == 1
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    batch, heads, _, width = query.shape
    queries = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    mask = added(mask, query.dtype)
    output = functional.scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, 1, heads, value.shape[-1])


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@functools.cache
def _norm_agrees(cls: Any, name: str) -> bool:
    norm = cls.__new__(cls)
    nn.Module.__init__(norm)
    norm.weight, norm.variance_epsilon = nn.Parameter(_random(8), requires_grad=False), 0.1
    states = 1 + _random(3, 8)
    return agree(
        f"norms ({cls.__name__}) are",
        lambda: (_NORMS[name].fused(states, (8,), norm.weight, eps=norm.variance_epsilon), cls.forward(norm, states)),
    )


@functools.cache
def _product_agrees() -> bool:
    numbers, scales = (20 * _random(5, 8)).to(torch.int8), _random(5, 1).abs()
    states, bias = _random(3, 8), _random(5)
    return agree(
        "quantized layers are",
        lambda: (_scaled_product(states, numbers, scales, bias), functional.linear(states, numbers * scales, bias)),
    )


@functools.cache
def _attention_agrees(usual: Any) -> bool:
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    query, key, value = _random(2, 4, 1, 8), _random(2, 2, 6, 8), _random(2, 2, 6, 8).flip(2)
    mask = torch.arange(6).view(1, 1, 1, 6) < torch.tensor([4, 6]).view(2, 1, 1, 1)
    return agree(
        "attention is",
        lambda: (_attend(query, key, value, mask, 0.3), usual(module, query, key, value, mask, scaling=0.3)[0]),
    )
