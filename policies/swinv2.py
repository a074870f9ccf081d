from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice


class Swinv2Policy(Policy):
    """A block of cosine attention with a scale per head. A small MLP computes the position biases, with one output per
    head."""

    block = "Swinv2Layer"
    plan = {
        "attention.self": Heads("num_attention_heads", scaled=("all_head_size",)),
        "attention.self.query": Column(),
        "attention.self.key": Column(),
        "attention.self.value": Column(),
        "attention.self.logit_scale": Slice(0),
        "attention.self.continuous_position_bias_mlp.2": Column(),
        "attention.output.dense": Row(heads="attention.self"),
        "intermediate.dense": Column(),
        "output.dense": Row(),
    }
