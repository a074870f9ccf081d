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
