"""Llama's decoder layer for one new token of each sequence on a CUDA device, in ten kernels: Triton's and torch's.

The kernels of a decoder layer in a decode step:

1. Residual + norm.
2. q, k, v: quantized weights in one kernel, others as `side_by_side.py` computes them.
3. Positions of q and k, and the write of k and v into the cache.
4. Attention, two kernels.
5. The output projection.
6. Residual + norm.
7. gate, up: as q, k, v.
8. act(gate) ⊙ up.
9. The down projection.

Products of quantized weights with few outputs are partial results. The kernel of the next line adds them, see
`triton/partial_results.py`. With several ranks, two more kernels add them, after lines 5 and 9, before the sum
over the ranks.

The modules stay in the model. They compute prompts, and all else that the kernels cannot compute, and the kernels are
compared with them: see `step_kernels.py`. Figures: benchmarks/results/gpu.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticCache

from parallelformers_ng.cuda_graphs.static_caches import ReusableLayer
from parallelformers_ng.kernels.layer_halves import is_rotation
from parallelformers_ng.kernels.on_devices import DeviceRMSNorm
from parallelformers_ng.kernels.operators import Guard, is_usual, shape_of
from parallelformers_ng.kernels.recognition import are_harmless, head_norms, is_known, is_silu_gated
from parallelformers_ng.sharding.cache_names import CACHE
from parallelformers_ng.sharding.encoding import SCALE
from parallelformers_ng.sharding.linear import RowParallel
from parallelformers_ng.sharding.quantized import QuantizedLinear

# The norm kernel holds a row in registers, so it supports no larger hidden size.
MAX_COLUMNS = 1 << 14
# Inputs with more rows are multiplied by a dequantized weight, in torch.
_MAX_ROWS = 32
_GROUP = 32
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class DeviceStep(NamedTuple):
    """The arguments that all layers of a decode step share, in the form that the kernels read.

    Attributes:
        cos, sin: cosines and sines of the rotary positions, `[rows or 1, width]`.
        mask: bytes, `[rows or 1, positions]`; 0 hides a position of the cache.
        cache: static cache of the step.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor
    cache: Any

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> DeviceStep | None:
        """Return the step, from the arguments of a decoder layer's forward; None if the kernels cannot compute it."""
        cache = others.pop(CACHE, None)
        others.pop("is_causal", None)  # for a single new token, causal attention is the same as full attention
        if attention_mask is None or position_embeddings is None:
            return None
        rows = hidden.shape[0]
        if not (
            hidden.shape[1:-1] == (1,)
            and hidden.is_contiguous()
            and hidden.dtype in _DTYPES
            and type(cache) is StaticCache
            and attention_mask.dtype is torch.bool
            and attention_mask.shape[1:-1] == (1, 1)
            and attention_mask.shape[0] in (1, rows)
            and attention_mask.is_contiguous()
            and all(is_rotation(angles, (rows, 1, *angles.shape[2:]), hidden.dtype) for angles in position_embeddings)
            and all(angles.is_contiguous() for angles in position_embeddings)
            and are_harmless(others)
        ):
            return None
        cos, sin = (angles.flatten(0, 1) for angles in position_embeddings)
        return cls(cos, sin, attention_mask.flatten(0, 2).view(torch.uint8), cache)


class DeviceLayer:
    """A decoder layer of Llama's kind that the Triton kernels compute, for one new token of each sequence.

    Args:
        layer: decoder layer that `of` has checked.
        head_norms: norms of each head's query and key, or an empty list.
        operators: object with the operators of `kernels/triton` as attributes.
    """

    def __init__(self, layer: Any, head_norms: list[Any], operators: Any) -> None:
        self._operators, self._head_norms = operators, head_norms
        self._attention, self._mlp = attention, mlp = layer.self_attn, layer.mlp
        self._norms: tuple[Any, Any] = (layer.input_layernorm, layer.post_attention_layernorm)
        norms = [*self._norms, *head_norms]
        places = [(norm._parameters, "weight") for norm in norms]
        places += [(module._modules, name) for module in (layer, attention, mlp) for name in module._modules]
        self.guard = Guard(places, (layer, attention, mlp, mlp.act_fn, *norms))

    @classmethod
    def of(cls, layer: Any, operators: Any) -> DeviceLayer | None:
        """Return a `DeviceLayer` for a decoder layer; None if the kernels cannot compute the layer."""
        attention = layer.self_attn if is_known(layer, "Layer") else None
        of_heads = None if attention is None else head_norms(attention)
        if attention is None or of_heads is None or not is_silu_gated(layer.mlp):
            return None
        known = cls(layer, of_heads, operators)
        fits = (
            all(isinstance(norm, DeviceRMSNorm) for norm in (*known._norms, *known._head_norms))
            and all(norm.weight.shape == (attention.head_dim,) for norm in known._head_norms)
            and all(norm.weight.shape[0] <= MAX_COLUMNS for norm in known._norms)
            and all(isinstance(each, nn.Linear) for each in (attention.q_proj, attention.k_proj, attention.v_proj))
            and len({norm.variance_epsilon for norm in known._head_norms}) <= 1
            and attention.config._attn_implementation == "sdpa"
            and attention.head_dim % 2 == 0
        )
        return known if fits and not known.guard.patched else None

    def fits(self, hidden: Tensor, step: DeviceStep) -> bool:
        """Return whether the kernels can compute this layer in a step with the input `hidden`, `[rows, 1, hidden]`."""
        attention, layers = self._attention, step.cache.layers
        cached = layers[attention.layer_idx] if attention.layer_idx < len(layers) else None
        if type(cached) is not ReusableLayer or not cached.is_initialized or not is_usual():
            return False
        rows, kv_heads, room, width = cached.keys.shape
        sizes = [shape_of(each)[0] for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
        return (
            rows == hidden.shape[0]
            and sizes == [kv_heads * width * shared for shared in (attention.num_key_value_groups, 1, 1)]
            and width == attention.head_dim == step.cos.shape[-1]
            and cached.values.shape == cached.keys.shape
            and all(states.stride()[2:] == (width, 1) for states in (cached.keys, cached.values))
            and cached.keys.dtype is cached.values.dtype is hidden.dtype
            and step.mask.shape[-1] == room
            and all(norm.weight.dtype is hidden.dtype for norm in (*self._norms, *self._head_norms))
            and all(norm.weight.shape == hidden.shape[2:] for norm in self._norms)
            and not self.guard.has_hooks()
        )

    def cached(self, step: DeviceStep) -> ReusableLayer:
        layer: ReusableLayer = step.cache.layers[self._attention.layer_idx]
        return layer

    def run(self, residual: Tensor, added: Tensor | None, step: DeviceStep) -> tuple[Tensor, Tensor]:
        """Compute this layer, and count the new token in the cache.

        Args:
            residual: sum of the embedding and of the outputs of earlier halves of layers, `[rows, 1, hidden]`.
            added: output of the previous layer's feed-forward, which is not yet in `residual`, as partial results,
                `[splits, rows, hidden]`. None if `residual` is the layer's whole input.

        Returns:
            The arguments `residual` and `added` of the next layer, or of `output`, which adds the two.
        """
        residual, normed = self._normed(self._norms[0], residual, added)
        residual, normed = self._normed(self._norms[1], residual, self._attended(normed, step))
        gate, up = self._products((self._mlp.gate_proj, self._mlp.up_proj), normed)
        gated = self._operators.gated(gate, up, normed.dtype)
        return residual, self._products([self._mlp.down_proj], gated.unsqueeze(1))[0]

    def output(self, residual: Tensor, added: Tensor) -> Tensor:
        return residual + self._operators.summed(added, residual.dtype).unsqueeze(1)

    def _normed(self, norm: Any, residual: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        weight, epsilon = norm._parameters["weight"], norm.variance_epsilon
        if added is None:
            return residual, self._operators.norm(residual, weight, epsilon)
        normed: tuple[Tensor, Tensor] = self._operators.sum_and_norm(residual, added, weight, epsilon)
        return normed

    def _attended(self, normed: Tensor, step: DeviceStep) -> Tensor:
        attention, cached = self._attention, self.cached(step)
        q, k, v = self._products((attention.q_proj, attention.k_proj, attention.v_proj), normed)
        weights = [norm._parameters["weight"] for norm in self._head_norms] or [None, None]
        epsilon = self._head_norms[0].variance_epsilon if self._head_norms else 0.0
        keys, values, count = cached.keys, cached.values, cached.cumulative_length.view(1)
        q = self._operators.rotate_and_write(q, k, v, step.cos, step.sin, *weights, epsilon, keys, values, count)
        attended = self._operators.attend(q, keys, values, count, float(attention.scaling), step.mask, count)
        return self._products([attention.o_proj], attended.unsqueeze(1))[0]

    def _products(self, layers: Sequence[Any], states: Tensor) -> Sequence[Tensor]:
        """Return the outputs of linear layers that all read `states`, each as partial results, `[splits, rows,
        outputs]`.

        A row-parallel layer must be the only one; its outputs are summed over the ranks.
        """
        operator = self._operator(layers, states)
        if operator is None:
            return [layer(states).flatten(0, -2).unsqueeze(0) for layer in layers]
        names = ("weight", "weight" + SCALE, "bias")
        weights, scales, biases = ([layer._parameters[name] for layer in layers] for name in names)
        output = operator(states, weights, scales, [] if biases[0] is None else biases)
        if isinstance(layers[0], RowParallel) and layers[0].communicator.world_size > 1:
            whole = self._operators.summed(output, states.dtype)
            output = layers[0].communicator.all_reduce(whole).unsqueeze(0)
        return output.split([len(weight) for weight in weights], dim=-1)

    def _operator(self, layers: Sequence[Any], states: Tensor) -> Any:
        """Return the operator that multiplies by the layers' quantized weights; None if no operator can."""
        if states.shape[0] > _MAX_ROWS or not all(_is_read(layer, states.dtype) for layer in layers):
            return None
        kinds = {(layer.encodings["weight"][0].kind, layer._parameters["bias"] is None) for layer in layers}
        if len(kinds) > 1:
            return None
        is_int4 = layers[0].encodings["weight"][0].kind == "int4"
        return self._operators.nibble_product if is_int4 else self._operators.byte_product


def _is_read(layer: Any, dtype: torch.dtype) -> bool:
    """Return whether a layer only multiplies by a quantized weight, in a format that the Triton kernels can read."""
    if not isinstance(layer, QuantizedLinear) or dtype not in (torch.bfloat16, torch.float16):
        return False
    if not _is_plain(type(layer)) or "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    parts: Any = layer._parameters
    (encoding, of_readers), weight, scales = layer.encodings["weight"], parts["weight"], parts["weight" + SCALE]
    if of_readers is not dtype or not scales.is_contiguous() or not weight.is_contiguous():
        return False
    if encoding.kind == "int4":
        inputs = weight.shape[1] * encoding.per_byte
        return encoding.block == _GROUP and inputs == _GROUP * scales.shape[1] and scales.dtype is dtype
    return encoding.has_scale_per_output(scales) and scales.dtype is torch.float32


def _is_plain(cls: type) -> bool:
    """Return whether a class is a quantized linear layer, or its row-parallel version."""
    if cls.__bases__[0] is RowParallel:
        cls = cls.__bases__[1]
    return cls is QuantizedLinear or QuantizedLinear in cls.__bases__
