from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class BarkPolicy(Policy):
    """GPT-2's block with q, k and v side by side, in all three models of Bark."""

    block = "BarkBlock"
    plan = {
        "attn": Heads("num_heads", scaled=("embed_dim",)),
        "attn.att_proj": Column(fused=3),
        "attn.out_proj": Row(),
        "mlp.in_proj": Column(),
        "mlp.out_proj": Row(),
    }


class BarkHeadPolicy(Policy):
    """The output head of the semantic and the coarse acoustic model. The head's vocabulary differs from the
    embeddings'."""

    block = "BarkCausalModel"
    plan = {"lm_head": Column(gather=True)}


class BarkFinePolicy(Policy):
    """The embedding and the output head of each codebook."""

    block = "BarkFineModel"
    plan = {"input_embeds_layers.*": Column(gather=True), "lm_heads.*": Column(gather=True)}
