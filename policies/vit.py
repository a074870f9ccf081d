from typing import ClassVar

from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class ViTPolicy(Policy):
    """An encoder block over image patches. The patch embedding and the classifier are small and stay whole."""

    block: ClassVar[str | tuple[str, ...]] = ("ViTLayer", "DeiTLayer")
    plan = {
        "attention": Heads("num_attention_heads"),
        "attention.q_proj": Column(),
        "attention.k_proj": Column(),
        "attention.v_proj": Column(),
        "attention.o_proj": Row(),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }
