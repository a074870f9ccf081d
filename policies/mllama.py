from parallelformers_ng.policies.llama import ATTENTION, MLP
from parallelformers_ng.policies.llama4 import Llama4VisionPolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, moved

_ATTENTION = {**ATTENTION, "self_attn": Heads("num_heads", "num_key_value_heads", groups="num_key_value_groups")}


class MllamaPolicy(Policy):
    """Llama 3.2 with images: Llama's block, and blocks with attention to the image in place of that to the text."""

    block = ("MllamaSelfAttentionDecoderLayer", "MllamaCrossAttentionDecoderLayer")
    plan = {**_ATTENTION, **MLP, **moved(_ATTENTION, "self_attn", "cross_attn")}
    optional = ("self_attn", "cross_attn")


class MllamaVisionPolicy(Llama4VisionPolicy):
    """The layer of the vision tower, on the tiles alone and on all of them."""

    block = "MllamaVisionEncoderLayer"


class MllamaProjectorPolicy(Policy):
    """Between the tower and the decoder."""

    block = "MllamaModel"
    plan = {"multi_modal_projector": Column(gather=True)}
