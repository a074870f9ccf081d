from parallelformers_ng.policies.swin import SwinMergingPolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice


class Swinv2Policy(Policy):
    """Cosine attention with a scale per head; a small MLP makes the position biases, with an output for each head."""

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


class Swinv2MergingPolicy(SwinMergingPolicy):
    """From four patches to one, between the stages."""

    block = "Swinv2PatchMerging"
