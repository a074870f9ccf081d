"""Attention that cannot run on a share of its heads as it is written, computed anew. Names are the modelling code's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from parallelformers_ng.sharding.layers import HeadParallel


class XLNetAttentionParallel(HeadParallel):
    """Relative attention (Yang et al. 2019, arXiv:1906.08237) whose output projection is a bare parameter O:

    z = norm(h + Σᵣ Σ_{heads n of r} aₙ Oₙᵀ)
    """

    o: torch.Tensor
    dropout: nn.Dropout
    layer_norm: nn.LayerNorm

    def post_attention(self, h: torch.Tensor, attn_vec: torch.Tensor, residual: bool = True) -> torch.Tensor:
        partial = torch.einsum("ibnd,hnd->ibh", attn_vec, self.o)
        projected = self.dropout(self.communicator.all_reduce(partial))
        return self.layer_norm(projected + h if residual else projected)


class WavLMAttentionParallel(HeadParallel):
    """Attention with a gated relative position bias (Chen et al. 2021, arXiv:2110.13900, §III.B). For each head n:

        gate = σ(a) ⊙ (σ(b) cₙ − 1) + 2,   (a, b) = sums of four columns each of xₙ U
        zₙ   = softmax(qₙ kₙᵀ / √d + gate ⊙ Bₙ) vₙ

    where xₙ are the columns of the whole hidden state that belong to head n. The modelling code hands the weights to
    torch's `multi_head_attention_forward`, which takes square projections alone.

    Attributes:
        head_indices: this rank's heads.
    """

    head_indices: Sequence[int]
    head_dim: int
    scaling: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
    gru_rel_pos_linear: nn.Linear
    gru_rel_pos_const: torch.Tensor
    compute_bias: Callable[[int, int], torch.Tensor]

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
            position_bias = self.compute_bias(length, length)  # [own heads, length, length], for all layers
        own_columns = self._by_heads(hidden_states)[:, list(self.head_indices)]
        sums = self.gru_rel_pos_linear(own_columns).unflatten(-1, (2, 4)).sum(-1)
        gate_a, gate_b = torch.sigmoid(sums).chunk(2, dim=-1)
        bias = (gate_a * (gate_b * self.gru_rel_pos_const - 1.0) + 2.0) * position_bias
        if attention_mask is not None:
            bias = bias.masked_fill(attention_mask.ne(1)[:, None, None, :], float("-inf"))

        query, key, value = (self._by_heads(layer(hidden_states)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        weights = torch.softmax(query @ key.transpose(-1, -2) * self.scaling + bias, dim=-1)
        output = self.out_proj((weights @ value).transpose(1, 2).flatten(2))
        if self.recording.weights:
            weights = self.gather_heads(weights, 1)
            # transformers shows the mean over the heads, once for each of them.
            weights = weights.mean(1, keepdim=True).expand_as(weights)
        return output, weights, position_bias

    def _by_heads(self, states: torch.Tensor) -> torch.Tensor:
        """`[batch, length, heads · head_dim]` → `[batch, heads, length, head_dim]`."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
