"""Defines parallel layers for attentions whose own forward cannot compute a subset of the heads.

The methods replace methods of the same names in transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from parallelformers_ng.sharding.heads import HeadParallel, NarrowedHeadParallel


class NgramAttentionParallel(NarrowedHeadParallel):
    """ProphetNet's attention, with one stream for each predicted token (Qi et al. 2020, arXiv:2001.04063).

    For the predicted streams, transformers writes the position embeddings in one order of positions, streams and
    heads, and reads them in another order. So a head reads embeddings that were computed for other heads. Therefore
    each rank computes the embeddings of all heads, and keeps those that its heads read.
    """

    num_attn_heads: int

    def get_main_relative_pos_embeddings(self, hidden: torch.Tensor, weights: torch.Tensor, *args: Any) -> torch.Tensor:
        return self._own(super().get_main_relative_pos_embeddings, 1, hidden, weights, *args)  # type: ignore[misc]

    def get_predict_relative_pos_embeddings(
        self, hidden: torch.Tensor, weights: torch.Tensor, *args: Any
    ) -> torch.Tensor:
        return self._own(super().get_predict_relative_pos_embeddings, 2, hidden, weights, *args)  # type: ignore[misc]

    def _own(self, make: Callable, dim: int, hidden: torch.Tensor, weights: torch.Tensor, *args: Any) -> torch.Tensor:
        """Call `make` as if this rank had all heads; return the slice of its result for this rank's heads.

        `dim` is the dimension of heads. `make` reads only the shape of `weights`, so an expanded tensor suffices.
        """
        own, self.num_attn_heads = self.num_attn_heads, sum(self.head_sizes)
        sizes = [self.num_attn_heads if d == dim else size for d, size in enumerate(weights.shape)]
        whole = make(hidden, weights.narrow(dim, 0, 1).expand(sizes), *args)
        self.num_attn_heads = own
        return self.own_heads(whole, dim)


_GENERATOR = threading.Lock()


class ReformerAttentionParallel(HeadParallel):
    """Reformer's attention: tokens attend within a bucket of equal hash (Kitaev et al. 2020, arXiv:2001.04451).

    Head n hashes by random rotations Rₙ. Each rank draws the rotations of all heads, so that they equal one process's.
    """

    def _hash_vectors(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The lock keeps seeding (`hash_seed`) and drawing together, because ranks may be threads with one generator.
        with _GENERATOR, _WholeDraws(self):
            return super()._hash_vectors(*args, **kwargs)  # type: ignore[misc]


class _WholeDraws(TorchFunctionMode):
    """Mode in which `torch.randn` draws random numbers for all heads (dimension 0) and returns this rank's heads."""

    def __init__(self, attention: HeadParallel) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.randn:
            return func(*args, **(kwargs or {}))
        (shape,) = args
        return self.attention.own_heads(func((sum(self.attention.head_sizes), *shape[1:]), **(kwargs or {})), 0)


class XLNetAttentionParallel(HeadParallel):
    """XLNet's attention (Yang et al. 2019, arXiv:1906.08237), whose output projection is a bare parameter `o`.

    Each rank projects the outputs of its heads, and `post_attention` sums the projections over the ranks. It takes
    `h` `[length, batch, width]` and `attn_vec` `[length, batch, own heads, head width]`. It returns
    `[length, batch, width]`, equal on all ranks.
    """

    def post_attention(self, h: torch.Tensor, attn_vec: torch.Tensor, residual: bool = True) -> torch.Tensor:
        partial = torch.einsum("ibnd,hnd->ibh", attn_vec, self.o)
        projected = self.dropout(self.communicator.all_reduce(partial))
        return self.layer_norm(projected + h if residual else projected)


class WavLMAttentionParallel(HeadParallel):
    """WavLM's attention with a gated relative position bias (Chen et al. 2021, arXiv:2110.13900, §III.B). For head n:

        gate = σ(a) ⊙ (σ(b) cₙ − 1) + 2,   a, b = sums over columns 0–3 and 4–7 of xₙ U
        zₙ   = softmax(qₙ kₙᵀ / √d + gate ⊙ Bₙ) vₙ

    xₙ are the columns of the whole hidden state that belong to head n. `forward` replaces transformers' forward, whose
    `multi_head_attention_forward` takes only square projections.

    `forward` takes hidden states `[batch, length, width]`, a mask `[batch, length]` with 1 for real positions, and the
    position bias B of this rank's heads `[heads, length, length]`; the first layer gets None and computes B. It
    returns the output, the attention weights of all heads, and B for the next layer.
    """

    renews = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        index: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        length = hidden_states.shape[1]
        if position_bias is None:
            position_bias = self.compute_bias(length, length)
        own_columns = self.own_heads(self._by_heads(hidden_states), 1)
        sums = self.gru_rel_pos_linear(own_columns).unflatten(-1, (2, 4)).sum(-1)
        gate_a, gate_b = torch.sigmoid(sums).chunk(2, dim=-1)
        bias = (gate_a * (gate_b * self.gru_rel_pos_const - 1.0) + 2.0) * position_bias
        if attention_mask is not None:
            bias = bias.masked_fill(attention_mask.ne(1)[:, None, None, :], float("-inf"))

        query, key, value = (self._by_heads(layer(hidden_states)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        weights = torch.softmax(query @ key.transpose(-1, -2) * self.scaling + bias, dim=-1)
        output = self.out_proj((weights @ value).transpose(1, 2).flatten(2))
        return output, self.shown(weights, 1, _mean_of_heads), position_bias

    def _by_heads(self, states: torch.Tensor) -> torch.Tensor:
        """`[batch, length, heads · head_dim]` → `[batch, heads, length, head_dim]`."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _mean_of_heads(weights: torch.Tensor) -> torch.Tensor:
    return weights.mean(1, keepdim=True).expand_as(weights)
