"""Defines changes of a model's code as programs make them: changes of modules, and of imported classes and
functions."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from transformers.cache_utils import DynamicLayer
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

from tests.zoo.decoders import decoder, gpt2


class BitLinear(nn.Linear):
    """A layer of BitNet, which scales by the whole weight, and by all activations of a token."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scale, steps = self.weight.abs().mean(), 127 / input.abs().amax(-1, keepdim=True).clamp_min(1e-5)
        weight = (self.weight / scale).round().clamp(-1, 1) * scale
        return nn.functional.linear((input * steps).round() / steps, weight, self.bias)


class Clamped(nn.Linear):
    """A layer with an upper bound that the sum of two ranks exceeds, although neither rank's partial sum exceeds it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(-0.05, 0.05)


class HandMadeLoRA(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + nn.functional.linear(nn.functional.linear(input, self.down), self.up)


class LogSoftmaxHead(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).log_softmax(-1)


def all_linear(cls: type[nn.Linear]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name, module in model.named_modules():
            if type(module) is nn.Linear and name != "lm_head":
                module.__class__ = cls

    return change


def with_lora(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        query = layer.self_attn.q_proj
        query.down = nn.Parameter(torch.randn(4, query.in_features, generator=generator) / 8)
        query.up = nn.Parameter(torch.randn(query.out_features, 4, generator=generator) / 2)
        query.__class__ = HandMadeLoRA


def pruned(model: Any) -> None:
    for layer in model.model.layers:
        prune.l1_unstructured(layer.mlp.down_proj, "weight", 0.5)


def _scaled_columns(self: Any, states: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states) * self.column_scale)


def scaled_columns(model: Any) -> None:
    """Give feed-forwards a parameter of their own, as IA3 does; a small copy of the model has no such parameter."""
    for layer in model.model.layers:
        width = layer.mlp.up_proj.out_features
        layer.mlp.column_scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        layer.mlp.forward = types.MethodType(_scaled_columns, layer.mlp)


def normed_weights(model: Any) -> None:
    for layer in model.model.layers:
        weight_norm(layer.self_attn.o_proj)


def largest_only(self: Any, states: torch.Tensor) -> torch.Tensor:
    """Compute a feed-forward with contextual sparsity: only the largest of all columns count."""
    inner = self.act_fn(self.gate_proj(states)) * self.up_proj(states)
    kept = inner.abs().topk(12, dim=-1).indices
    return self.down_proj(torch.zeros_like(inner).scatter(-1, kept, inner.gather(-1, kept)))


def sparse_feed_forward(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(largest_only, layer.mlp)


class GatedAttention(nn.Module):
    """An attention with a gate for each token, computed from all queries of the token."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.inner = attention

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> Any:
        output, weights = self.inner(hidden_states=hidden_states, **others)
        return output * self.inner.q_proj(hidden_states).mean(-1, keepdim=True).sigmoid(), weights


def gated_attention(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn = GatedAttention(layer.self_attn)


def log_softmax_head(model: Any) -> None:
    model.lm_head.__class__ = LogSoftmaxHead


def softmax_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Softmax(-1)


def normed_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.LogSoftmax(-1))


class LargestOnly:
    """A feed-forward in an object that holds the module whose weights it uses."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return largest_only(self.module, states)


def feed_forward_of_an_object(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = LargestOnly(layer.mlp)


def partial_feed_forward(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = functools.partial(largest_only, layer.mlp)


def activation_of_torch(model: Any) -> None:
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = functools.partial(nn.functional.softmax, dim=-1)


def layer_norm_as_activation(model: Any) -> None:
    width = model.config.intermediate_size
    model.model.layers[0].mlp.act_fn = nn.LayerNorm(width)
    model.model.layers[1].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.LayerNorm(width))


CHANGES = {
    "BitNet's layers": all_linear(BitLinear),
    "clamped sums": all_linear(Clamped),
    "hand-made LoRA": with_lora,
    "pruning masks": pruned,
    "weight norm": normed_weights,
    "a scale of columns": scaled_columns,
    "a sparse feed-forward": sparse_feed_forward,
    "a gate over all queries": gated_attention,
    "a head that ends in a log-softmax": log_softmax_head,
    "an activation over all columns": softmax_activation,
    "an activation in two steps": normed_activation,
    "a feed-forward of an object": feed_forward_of_an_object,
    "a feed-forward of a partial function": partial_feed_forward,
    "a softmax as activation": activation_of_torch,
    "a layer norm as activation": layer_norm_as_activation,
}


def doubled(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Compute a root-mean-square norm with an offset in its weight, like Gemma's."""
    states = hidden_states.float()
    states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return ((1.0 + self.weight.float()) * states).to(hidden_states.dtype)


def no_positions(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q, k


def one_for_all_heads(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Compute a feed-forward divided by the norm of its whole inner state."""
    inner = self.act(self.c_fc(hidden_states))
    return self.c_proj(inner / inner.norm(dim=-1, keepdim=True))


def doubling(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def call(*args: Any) -> torch.Tensor:
        return 2 * forward(*args)

    return call


def followed_by(function: Callable[[torch.Tensor], torch.Tensor], inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(inner(*args, **kwargs))


def bounded(states: torch.Tensor) -> torch.Tensor:
    return states.clamp(-0.05, 0.05)


def scaling_states(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward that transformers has wrapped in functions that cannot be copied."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state.clamp(-0.5, 0.5)
        return output

    return call


def next_ids(prepare: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = prepare(self, *args, **kwargs)
        return {**inputs, "input_ids": (inputs["input_ids"] + 1) % 90}

    return call


def rounding(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return a cache update that stores keys in fewer bits."""

    def call(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return update(self, (keys * 8).round() / 8, values, *args, **kwargs)

    return call


PATCHES: dict[str, tuple[Callable[[], Any], Any, str, Any]] = {
    "a norm": (lambda: decoder("Llama"), modeling_llama.LlamaRMSNorm, "forward", doubled),
    "positions": (lambda: decoder("Llama"), modeling_llama, "apply_rotary_pos_emb", no_positions),
    "a feed-forward": (lambda: decoder("Llama"), modeling_llama.LlamaMLP, "forward", largest_only),
    "a function named after what it replaces": (
        lambda: decoder("Llama"),
        modeling_llama.LlamaMLP,
        "forward",
        doubling(modeling_llama.LlamaMLP.forward),
    ),
    "a feed-forward of GPT-2": (gpt2, modeling_gpt2.GPT2MLP, "forward", one_for_all_heads),
    "a model's forward": (
        lambda: decoder("Llama"),
        modeling_llama.LlamaModel,
        "forward",
        scaling_states(modeling_llama.LlamaModel.forward),
    ),
    "the forward of GPT-2's model": (
        gpt2,
        modeling_gpt2.GPT2Model,
        "forward",
        scaling_states(modeling_gpt2.GPT2Model.forward),
    ),
    "a function of torch's layers": (
        lambda: decoder("Llama"),
        nn.functional,
        "linear",
        followed_by(bounded, nn.functional.linear),
    ),
    "torch's layer norm": (gpt2, nn.functional, "layer_norm", followed_by(torch.tanh, nn.functional.layer_norm)),
    "a method that the class inherits": (
        lambda: decoder("Llama"),
        modeling_llama.LlamaMLP,
        "__call__",
        followed_by(torch.tanh, nn.Module.__call__),
    ),
    "how a model prepares its inputs": (
        gpt2,
        modeling_gpt2.GPT2LMHeadModel,
        "prepare_inputs_for_generation",
        next_ids(modeling_gpt2.GPT2LMHeadModel.prepare_inputs_for_generation),
    ),
    "a property in the place of an attribute": (
        lambda: decoder("Llama"),
        modeling_llama.LlamaAttention,
        "scaling",
        property(lambda attention: 0.01, lambda attention, value: None),
    ),
    "a cache's layer": (gpt2, DynamicLayer, "update", rounding(DynamicLayer.update)),
    "a method of tensors": (lambda: decoder("Llama"), torch.Tensor, "pow", followed_by(torch.sqrt, torch.Tensor.pow)),
    "a product of torch": (lambda: decoder("Llama"), nn.Linear, "forward", Clamped.forward),
}
