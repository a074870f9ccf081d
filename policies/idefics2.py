from parallelformers_ng.policies.clip import CLIPPolicy
from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.policy import Column, Heads, Policy, Row


class Idefics2VisionPolicy(CLIPPolicy):
    """CLIP's layer, here and in Idefics 3 and SmolVLM. The decoder has a policy of its own."""

    block = ("Idefics2EncoderLayer", "Idefics3EncoderLayer", "SmolVLMEncoderLayer")


class Idefics2ResamplerPolicy(Policy):
    """Grouped-query attention of latents to patches, and Llama's MLP."""

    block = "Idefics2PerceiverLayer"
    plan = {
        "self_attn": Heads("num_heads", "num_key_value_heads", groups="num_key_value_groups"),
        "self_attn.q_proj": Column(),
        "self_attn.k_proj": Column("key"),
        "self_attn.v_proj": Column("key"),
        "self_attn.o_proj": Row(),
        **MLP,
    }


class Idefics2ConnectorPolicy(Policy):
    """Between the tower and the decoder: Llama's MLP, or, later, one layer."""

    block = ("Idefics2Connector", "Idefics3Connector", "SmolVLMConnector")
    plan = {
        **{path.replace("mlp.", "modality_projection."): rule for path, rule in MLP.items()},
        "modality_projection.proj": Column(gather=True),
    }
    optional = ("modality_projection",)
