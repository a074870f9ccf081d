from parallelformers_ng.policies.clip import CLIPPolicy
from parallelformers_ng.policies.llama import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Heads, Policy, moved


class Idefics2VisionPolicy(CLIPPolicy):
    """CLIP's layer, here and in Idefics 3 and SmolVLM. The decoder has a policy of its own."""

    block = ("Idefics2EncoderLayer", "Idefics3EncoderLayer", "SmolVLMEncoderLayer")


class Idefics2ResamplerPolicy(Policy):
    """Grouped-query attention of latents to patches, and Llama's MLP."""

    block = "Idefics2PerceiverLayer"
    plan = {
        **ATTENTION,
        "self_attn": Heads("num_heads", "num_key_value_heads", groups="num_key_value_groups"),
        **MLP,
    }


class Idefics2ConnectorPolicy(Policy):
    """Between the tower and the decoder: Llama's MLP, or, later, one layer."""

    block = ("Idefics2Connector", "Idefics3Connector", "SmolVLMConnector")
    plan = {
        **moved(MLP, "mlp", "modality_projection"),
        "modality_projection.proj": Column(gather=True),
    }
    optional = ("modality_projection",)
