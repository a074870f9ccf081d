from parallelformers_ng.sharding.rules import Column, Heads, Norm, Policy, Row


class InternVLVisionPolicy(Policy):
    """The layer of InternVL's vision tower. The large tower has norms over all heads of q, and over all heads of k."""

    block = "InternVLVisionLayer"
    plan = {
        "attention": Heads("num_heads", scaled=("embed_dim",)),
        "attention.q_proj": Column(),
        "attention.k_proj": Column(),
        "attention.v_proj": Column(),
        "attention.q_norm": Norm(),
        "attention.k_norm": Norm(),
        "attention.projection_layer": Row(),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }
    optional = ("attention.q_norm", "attention.k_norm")
