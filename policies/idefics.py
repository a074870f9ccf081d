from parallelformers_ng.policies.llama import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Heads, Policy, moved

_ATTENTION = {**ATTENTION, "self_attn": Heads("num_heads")}


class IdeficsPolicy(Policy):
    """Llama's block with equal numbers of query heads and key/value heads, and the blocks with cross-attention to the
    image between these blocks."""

    block = ("IdeficsDecoderLayer", "IdeficsGatedCrossAttentionLayer")
    plan = {**_ATTENTION, **moved(_ATTENTION, "self_attn", "cross_attn"), **MLP}
    optional = ("self_attn", "cross_attn")


class IdeficsEmbeddingPolicy(Policy):
    """An embedding with a second embedding for added tokens. The output head has the same structure and stays whole."""

    block = "IdeficsModel"
    plan = {"embed_tokens": Column(gather=True), "embed_tokens.additional_embedding": Column()}
    optional = ("embed_tokens.additional_embedding",)


class Idefics2ResamplerPolicy(Policy):
    """A layer in which learned latents attend to image patches by grouped-query attention, with Llama's MLP."""

    block = "Idefics2PerceiverLayer"
    plan = {**ATTENTION, "self_attn": Heads("num_heads", "num_key_value_heads", groups="num_key_value_groups"), **MLP}


class Idefics2ConnectorPolicy(Policy):
    """The connector between vision tower and decoder: Llama's MLP, or a single layer in later models."""

    block = ("Idefics2Connector", "Idefics3Connector", "SmolVLMConnector")
    plan = {**moved(MLP, "mlp", "modality_projection"), "modality_projection.proj": Column(gather=True)}
    optional = ("modality_projection",)
