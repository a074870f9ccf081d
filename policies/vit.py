from parallelformers_ng.policies.dinov3 import ATTENTION
from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice


class ViTPolicy(Policy):
    """An encoder block over image patches. The patch embedding and the classifier are small and stay whole.

    DINOv2's giant model has a gated MLP. In Swin, which attends to shifted windows, the table of position biases has
    one column per head.
    """

    block = ("ViTLayer", "DeiTLayer", "Dinov2Layer", "Dinov2WithRegistersLayer", "SwinLayer")
    plan = {
        **ATTENTION,
        **MLP,
        "attention": Heads("num_attention_heads"),
        "attention.relative_position_bias.relative_position_bias_table": Slice(1),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }
    optional = ("attention.relative_position_bias", "mlp")
