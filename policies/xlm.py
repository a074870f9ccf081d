from __future__ import annotations

from typing import ClassVar

from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class XLMAttentionPolicy(Policy):
    """Attention, kept by the model in a list apart from the feed-forwards. As a decoder it may have cross-attention."""

    block: ClassVar[str | tuple[str, ...]] = "xlm.MultiHeadAttention"
    plan = {
        "": Heads("n_heads"),
        "q_lin": Column(),
        "k_lin": Column(),
        "v_lin": Column(),
        "out_lin": Row(),
    }


class XLMFeedForwardPolicy(Policy):
    """The feed-forwards."""

    block: ClassVar[str | tuple[str, ...]] = "xlm.TransformerFFN"
    plan = {"lin1": Column(), "lin2": Row()}


class XLMPoolerPolicy(Policy):
    """The layers in front of the answers' ends and of whether there is an answer."""

    block: ClassVar[str | tuple[str, ...]] = ("XLMPoolerEndLogits", "XLMPoolerAnswerClass")
    plan = {"dense_0": Column(gather=True)}
