from parallelformers_ng.sharding.policy import Column, Heads, Policy, Row


class PixtralPolicy(Policy):
    """The layer of Mistral's vision tower, with Llama's MLP."""

    block = "PixtralAttentionLayer"
    plan = {
        "attention": Heads("num_heads", scaled=("embed_dim",)),
        "attention.q_proj": Column(),
        "attention.k_proj": Column(),
        "attention.v_proj": Column(),
        "attention.o_proj": Row(),
        "feed_forward.gate_proj": Column(),
        "feed_forward.up_proj": Column(),
        "feed_forward.down_proj": Row(),
    }


class Mistral3ProjectorPolicy(Policy):
    """Between the tower and the decoder: patches are merged, then an MLP."""

    block = "Mistral3MultiModalProjector"
    plan = {"patch_merger.merging_layer": Column(gather=True), "linear_1": Column(), "linear_2": Row()}
