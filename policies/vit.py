from parallelformers_ng.policies.dinov3 import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class ViTPolicy(Policy):
    """An encoder block over image patches. The patch embedding and the classifier are small and stay whole."""

    block = ("ViTLayer", "DeiTLayer")
    plan = {**ATTENTION, "attention": Heads("num_attention_heads"), "mlp.fc1": Column(), "mlp.fc2": Row()}
