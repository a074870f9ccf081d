"""Llama's decoder layer and its many copies for one new token of each sequence: two calls of `_layer.h` and the sums
over the ranks behind them, where the modelling code takes some fifty operators.

The modules stay what they are and serve whatever the kernel does not: prompts, gradients, hooks, other caches.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from parallelformers_ng.kernels.layer_halves import AttentionHalf, FeedHalf
from parallelformers_ng.kernels.streaming_linear import may_serve


class FusedDecoderLayer(nn.Module):
    """Mixed into the classes of decoder layers whose forward is Llama's."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or self.training or not is_step(hidden_states) or not may_serve():
            return super().forward(hidden_states, *args, **kwargs)
        layer: Any = self
        attention, feed = self.halves()
        step = None if attention is None else attention.step_for(hidden_states, **kwargs)
        if attention is not None and step is not None:
            attended = attention.run(hidden_states, step, kwargs["past_key_values"])
        elif feed is None:
            return super().forward(hidden_states, **kwargs)
        else:
            attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        if feed is not None and feed.fits(hidden_states, attended):
            return feed.run(hidden_states, attended)
        residual = hidden_states + attended
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    def halves(self) -> tuple[AttentionHalf | None, FeedHalf | None]:
        """What the kernel knows of this layer, remembered for as long as it is so."""
        held: tuple[AttentionHalf | None, FeedHalf | None] | None = self.__dict__.get("_kernel_halves")
        if held is not None:
            attention, feed = held
            if (attention is None or attention.held.are_current()) and (feed is None or feed.held.are_current()):
                return held
        attention, feed = AttentionHalf.of(self), FeedHalf.of(self)
        held = self.__dict__["_kernel_halves"] = (
            None if attention is None or attention.held.patched else attention,
            None if feed is None or feed.held.patched else feed,
        )
        return held

    def forget(self) -> None:
        """Read the modules anew before the next step."""
        self.__dict__.pop("_kernel_halves", None)


def is_step(hidden: Tensor) -> bool:
    """Whether a tensor is `[batch, 1, hidden]` as the kernel reads it."""
    return hidden.ndim == 3 and hidden.shape[1] == 1 and hidden.is_cpu and hidden.is_contiguous()
