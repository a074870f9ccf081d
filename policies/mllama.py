from parallelformers_ng.policies.llama import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Heads, Policy, moved

_ATTENTION = {**ATTENTION, "self_attn": Heads("num_heads", "num_key_value_heads", groups="num_key_value_groups")}


class MllamaPolicy(Policy):
    """The blocks of Llama 3.2 with images: Llama's blocks, and blocks with cross-attention to the image instead of
    self-attention."""

    block = ("MllamaSelfAttentionDecoderLayer", "MllamaCrossAttentionDecoderLayer")
    plan = {**_ATTENTION, **MLP, **moved(_ATTENTION, "self_attn", "cross_attn")}
    optional = ("self_attn", "cross_attn")
