from parallelformers_ng.policies.clip import CLIPPolicy
from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, moved


class IdeficsPolicy(Policy):
    """Llama's block with as many key/value as query heads."""

    block = "IdeficsDecoderLayer"
    plan = {**LlamaPolicy.plan, "self_attn": Heads("num_heads")}


class IdeficsCrossAttentionPolicy(Policy):
    """Blocks between those that look at the image."""

    block = "IdeficsGatedCrossAttentionLayer"
    plan = moved(IdeficsPolicy.plan, "self_attn", "cross_attn")


class IdeficsVisionPolicy(CLIPPolicy):
    """CLIP's layer."""

    block = "IdeficsVisionEncoderLayer"


class IdeficsEmbeddingPolicy(Policy):
    """An embedding with a second one inside for added tokens; the head has the same form and stays whole."""

    block = "IdeficsModel"
    plan = {"embed_tokens": Column(gather=True), "embed_tokens.additional_embedding": Column()}
    optional = ("embed_tokens.additional_embedding",)
