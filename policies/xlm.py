from __future__ import annotations

from typing import ClassVar

from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class XLMAttentionPolicy(Policy):
    """XLM's attention; the model keeps attentions and feed-forwards in separate lists. In a decoder, XLM may have
    cross-attention."""

    block: ClassVar[str | tuple[str, ...]] = "xlm.MultiHeadAttention"
    plan = {
        "": Heads("n_heads"),
        "q_lin": Column(),
        "k_lin": Column(),
        "v_lin": Column(),
        "out_lin": Row(),
    }


class XLMFeedForwardPolicy(Policy):
    """XLM's feed-forward."""

    block: ClassVar[str | tuple[str, ...]] = "xlm.TransformerFFN"
    plan = {"lin1": Column(), "lin2": Row()}


class XLMPoolerPolicy(Policy):
    """The dense layers before the heads that predict the end of an answer and whether an answer exists."""

    block: ClassVar[str | tuple[str, ...]] = ("XLMPoolerEndLogits", "XLMPoolerAnswerClass")
    plan = {"dense_0": Column(gather=True)}
