"""Makes a model whose attention packs its heads in an order that no rule knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class ShuffledAttention(nn.Module):
    """An attention in which each query head reads the keys of the next head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        parts = self.qkv_proj(hidden_states).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        attended = nn.functional.scaled_dot_product_attention(q.roll(1, 1), k, v, is_causal=True)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None


class ShuffledBlock(LlamaDecoderLayer):
    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn: Any = ShuffledAttention(config)


class ShuffledForCausalLM(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(ShuffledBlock(config, index) for index in range(config.num_hidden_layers))
