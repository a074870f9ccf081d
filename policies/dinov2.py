from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.policies.vit import ViTPolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class Dinov2Policy(ViTPolicy):
    """ViT's block. The giant model has a gated MLP."""

    block = ("Dinov2Layer", "Dinov2WithRegistersLayer")
    plan = {**ViTPolicy.plan, **MLP}
    optional = ("mlp",)
    holds = ("attention.q_proj",)


class Dinov2EarlierPolicy(Policy):
    """DINOv2's layer in transformers up to 5.17, with other names. The giant model packs gate and up in one layer."""

    block = Dinov2Policy.block
    plan = {
        "attention.attention": Heads("num_attention_heads", scaled=("all_head_size",)),
        "attention.attention.query": Column(),
        "attention.attention.key": Column(),
        "attention.attention.value": Column(),
        "attention.output.dense": Row(heads="attention.attention"),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
        "mlp.weights_in": Column(fused=2),
        "mlp.weights_out": Row(),
    }
    optional = ("mlp",)
    holds = ("attention.attention.query",)
