from parallelformers_ng.sharding.rules import Column, Heads, Norm, Policy, Row


class InternVLVisionPolicy(Policy):
    """The layer of the vision tower; the large one has norms over all heads of q and of k together."""

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


class InternVLProjectorPolicy(Policy):
    """The MLP between the tower and the decoder, with a policy of its own."""

    block = "InternVLMultiModalProjector"
    plan = {"linear_1": Column(), "linear_2": Row()}
