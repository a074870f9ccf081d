from parallelformers_ng.sharding.rules import Column, Heads, Policy, Renewed, Row


class BigBirdPegasusEncoderPolicy(Policy):
    """BigBird's attention in Pegasus' layer. For a short sequence the model changes to full attention."""

    block = "BigBirdPegasusEncoderLayer"
    plan = {
        "self_attn.self": Heads("num_attention_heads", scaled=("all_head_size",)),
        "self_attn.self.query": Column(),
        "self_attn.self.key": Column(),
        "self_attn.self.value": Column(),
        "self_attn": Renewed("self"),
        "self_attn.output": Row(heads="self_attn.self"),
        "fc1": Column(),
        "fc2": Row(),
    }
