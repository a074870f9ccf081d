from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Column, Experts, Heads, Policy, Row, Stored


class Gemma4Policy(Policy):
    """Layers differ in the number of key/value heads, and some read the keys and values of an earlier one, or have
    no projection of values. Every layer has an MLP, some models routed experts beside it."""

    block = "Gemma4TextDecoderLayer"
    plan = {
        "self_attn": Heads("config.num_attention_heads", groups="num_key_value_groups"),
        "self_attn.q_proj": Column(),
        "self_attn.k_proj": Column("key"),
        "self_attn.v_proj": Column("key"),
        "self_attn.o_proj": Row(),
        **MLP,
        "experts": Experts(),
        "per_layer_input_gate": Column(gather=True),
        "per_layer_projection": Column(gather=True),
    }
    optional = ("self_attn.v_proj", "experts", "per_layer_input_gate", "per_layer_projection")


class Gemma4InputsPolicy(Policy):
    """The embeddings that each layer has of its own: one table for all, as large as the rest of the small models."""

    block = "Gemma4TextModel"
    plan = {
        "embed_tokens_per_layer": Column(gather=True),
        "per_layer_model_projection": Column(gather=True),
    }
    optional = ("embed_tokens_per_layer", "per_layer_model_projection")


class Gemma4VisionPolicy(Policy):
    """The layer of the vision tower, whose linear layers may clip what goes in and out."""

    block = "Gemma4VisionEncoderLayer"
    plan = {
        "self_attn": Heads("config.num_attention_heads", "config.num_key_value_heads", groups="num_key_value_groups"),
        "self_attn.q_proj.linear": Column(),
        "self_attn.k_proj.linear": Column("key"),
        "self_attn.v_proj.linear": Column("key"),
        "self_attn.o_proj.linear": Row(),
        **{f"{path}.linear": rule for path, rule in MLP.items()},
    }


class DiffusionGemmaPolicy(Policy):
    """Gemma 4's layer with experts, in the encoder and, with the same weights, in the decoder, which reads the keys
    and values of the encoder. Layers of full attention have no projection of values."""

    block = ("DiffusionGemmaEncoderTextLayer", "DiffusionGemmaDecoderTextLayer")
    plan = {path: rule for path, rule in Gemma4Policy.plan.items() if not path.startswith("per_layer")}
    optional = ("self_attn.v_proj",)


class DiffusionGemmaSelfConditioningPolicy(Policy):
    """An MLP over what the last step of denoising predicted."""

    block = "DiffusionGemmaSelfConditioning"
    plan = {"gate_proj": Column(), "up_proj": Column(), "down_proj": Row()}


class DiffusionGemmaDecoderPolicy(Policy):
    """The decoder multiplies the last step's probabilities with the whole table of embeddings."""

    block = "DiffusionGemmaDecoderModel"
    plan = {"embed_tokens": Stored()}
