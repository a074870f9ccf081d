from typing import ClassVar

from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row

ATTENTION = {
    "self_attn": Heads("config.num_attention_heads", "config.num_key_value_heads", groups="num_key_value_groups"),
    "self_attn.q_proj": Column(),
    "self_attn.k_proj": Column("key"),
    "self_attn.v_proj": Column("key"),
    "self_attn.o_proj": Row(),
}
MLP = {"mlp.gate_proj": Column(), "mlp.up_proj": Column(), "mlp.down_proj": Row()}


class LlamaPolicy(Policy):
    """A block with grouped-query attention and a gated MLP, the layout of most later decoders."""

    block: ClassVar[str | tuple[str, ...]] = "LlamaDecoderLayer"
    plan = {**ATTENTION, **MLP}
