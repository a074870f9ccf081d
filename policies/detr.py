from __future__ import annotations

from parallelformers_ng.sharding.policy import Column, Heads, Policy, Row


class DetrEncoderPolicy(Policy):
    """The encoder's layer; positions are added to queries and keys in front of their projections. The backbone stays
    whole."""

    block = "DetrEncoderLayer"
    plan = {
        "self_attn": Heads("config.encoder_attention_heads"),
        "self_attn.q_proj": Column(),
        "self_attn.k_proj": Column(),
        "self_attn.v_proj": Column(),
        "self_attn.o_proj": Row(),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }


class DetrDecoderPolicy(DetrEncoderPolicy):
    """The decoder's layer, over one query for each object that may be found."""

    block = "DetrDecoderLayer"
    plan = {
        **DetrEncoderPolicy.plan,
        "self_attn": Heads("config.decoder_attention_heads"),
        "encoder_attn": Heads("config.decoder_attention_heads"),
        "encoder_attn.q_proj": Column(),
        "encoder_attn.k_proj": Column(),
        "encoder_attn.v_proj": Column(),
        "encoder_attn.o_proj": Row(),
    }


class DetrBoxPolicy(Policy):
    """The feed-forward that ends in the corners of a box."""

    block = "DetrMLPPredictionHead"
    plan = {"layers.0": Column(gather=True), "layers.1": Column(gather=True)}
