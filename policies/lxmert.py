from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved


class LxmertSelfAttentionPolicy(Policy):
    """Attention among words, or among regions of an image."""

    block = "LxmertSelfAttentionLayer"
    plan = {
        "self": Heads("num_attention_heads", scaled=("head_size",)),
        "self.query": Column(),
        "self.key": Column(),
        "self.value": Column(),
        "output.dense": Row(heads="self"),
    }


class LxmertCrossAttentionPolicy(Policy):
    """Attention from words to regions, and with the same weights from regions to words."""

    block = "LxmertCrossAttentionLayer"
    plan = moved(LxmertSelfAttentionPolicy.plan, "self", "att")


class LxmertFeedForwardPolicy(Policy):
    """The feed-forwards: one in a layer over words or regions, and two in a layer of cross-attention."""

    block = ("LxmertLayer", "LxmertXLayer")
    plan = {
        "intermediate.dense": Column(),
        "output.dense": Row(),
        "lang_inter.dense": Column(),
        "lang_output.dense": Row(),
        "visn_inter.dense": Column(),
        "visn_output.dense": Row(),
    }
    optional = ("intermediate", "output", "lang_inter", "lang_output", "visn_inter", "visn_output")
