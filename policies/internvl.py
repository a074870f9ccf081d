from parallelformers_ng.policies.dinov3 import HEADS
from parallelformers_ng.sharding.rules import Column, Norm, Policy, Row


class InternVLVisionPolicy(Policy):
    """The layer of InternVL's vision tower. The large tower has norms over all heads of q, and over all heads of k."""

    block = "InternVLVisionLayer"
    plan = {
        **HEADS,
        "attention.{q,k}_norm": Norm(),
        "attention.projection_layer": Row(),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }
    optional = ("attention.q_norm", "attention.k_norm")
