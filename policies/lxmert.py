from parallelformers_ng.policies.bert import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved


class LxmertSelfAttentionPolicy(Policy):
    """Attention among words, or among regions of an image."""

    block = "LxmertSelfAttentionLayer"
    plan = {**moved(ATTENTION, "attention", ""), "self": Heads("num_attention_heads", scaled=("head_size",))}


class LxmertCrossAttentionPolicy(Policy):
    """Cross-attention between words and image regions; both directions have the same weights."""

    block = "LxmertCrossAttentionLayer"
    plan = moved(LxmertSelfAttentionPolicy.plan, "self", "att")


class LxmertFeedForwardPolicy(Policy):
    """The feed-forwards: one in a layer over words or regions, and two in a layer of cross-attention."""

    block = ("LxmertLayer", "LxmertXLayer")
    plan = {**MLP, "{lang,visn}_inter.dense": Column(), "{lang,visn}_output.dense": Row()}
    optional = ("intermediate", "output", "lang_inter", "lang_output", "visn_inter", "visn_output")
