from __future__ import annotations

from parallelformers_ng.policies.bart import BartPolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class LEDEncoderPolicy(Policy):
    """Longformer's attention in BART's encoder layer."""

    block = "LEDEncoderLayer"
    plan = {
        "self_attn.longformer_self_attn": Heads("num_heads", weights_dim=2, more_weights=((2, 1),), input_width=True),
        "self_attn.longformer_self_attn.query": Column(),
        "self_attn.longformer_self_attn.key": Column(),
        "self_attn.longformer_self_attn.value": Column(),
        "self_attn.longformer_self_attn.query_global": Column(),
        "self_attn.longformer_self_attn.key_global": Column(),
        "self_attn.longformer_self_attn.value_global": Column(),
        "self_attn.output": Row(heads="self_attn.longformer_self_attn"),
        "fc1": Column(),
        "fc2": Row(),
    }


class LEDDecoderPolicy(BartPolicy):
    """BART's decoder layer in LED."""

    block = "LEDDecoderLayer"
    plan = {
        **BartPolicy.plan,
        "self_attn": Heads("num_heads", input_width=True),
        "encoder_attn": Heads("num_heads", input_width=True),
    }
