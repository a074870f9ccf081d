from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class BarkPolicy(Policy):
    """GPT-2's block with q, k and v side by side, in all three models."""

    block = "BarkBlock"
    plan = {
        "attn": Heads("num_heads", scaled=("embed_dim",)),
        "attn.att_proj": Column(fused=3),
        "attn.out_proj": Row(),
        "mlp.in_proj": Column(),
        "mlp.out_proj": Row(),
    }


class BarkHeadPolicy(Policy):
    """The head of the models for meaning and for coarse sound, whose vocabulary is not that of their embeddings."""

    block = "BarkCausalModel"
    plan = {"lm_head": Column(gather=True)}


class BarkFinePolicy(Policy):
    """An embedding and a head for each codebook."""

    block = "BarkFineModel"
    plan = {"input_embeds_layers.*": Column(gather=True), "lm_heads.*": Column(gather=True)}
