from parallelformers_ng.policies.llama import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Heads, Policy, moved


class Idefics2ResamplerPolicy(Policy):
    """A layer with grouped-query attention from latents to patches, and Llama's MLP."""

    block = "Idefics2PerceiverLayer"
    plan = {
        **ATTENTION,
        "self_attn": Heads("num_heads", "num_key_value_heads", groups="num_key_value_groups"),
        **MLP,
    }


class Idefics2ConnectorPolicy(Policy):
    """The connector between vision tower and decoder: Llama's MLP, or a single layer in later models."""

    block = ("Idefics2Connector", "Idefics3Connector", "SmolVLMConnector")
    plan = {
        **moved(MLP, "mlp", "modality_projection"),
        "modality_projection.proj": Column(gather=True),
    }
    optional = ("modality_projection",)
