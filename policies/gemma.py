from parallelformers_ng.policies.llama import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Experts, GaussianTopK, Heads, Policy, Row, Stored


class Gemma3nPolicy(Policy):
    """A layer with Llama's attention and an MLP. Later layers read keys and values of an earlier layer, and the first
    layers' MLPs drop most columns. Narrow layers for per-layer inputs and the low-rank residual stay whole."""

    block = "Gemma3nTextDecoderLayer"
    plan = {
        **ATTENTION,
        **MLP,
        "mlp": GaussianTopK(),
        "per_layer_{input_gate,projection}": Column(gather=True),
    }


class Gemma4Policy(Policy):
    """A layer with attention, an MLP, and routed experts in some models. Layers differ in the number of key/value
    heads. Some layers read keys and values of an earlier layer, and some have no projection of values. In
    DiffusionGemma, encoder and decoder share weights, and the decoder reads the encoder's keys and values."""

    block = ("Gemma4TextDecoderLayer", "DiffusionGemmaEncoderTextLayer", "DiffusionGemmaDecoderTextLayer")
    plan = {
        **ATTENTION,
        **MLP,
        "self_attn": Heads("config.num_attention_heads", groups="num_key_value_groups"),
        "experts": Experts(),
        "per_layer_{input_gate,projection}": Column(gather=True),
    }
    optional = ("self_attn.v_proj", "experts", "per_layer_input_gate", "per_layer_projection")


class Gemma4VisionPolicy(Policy):
    """The layer of Gemma 4's vision tower. Its linear layers may clip inputs and outputs."""

    block = "Gemma4VisionEncoderLayer"
    plan = {
        "self_attn": Heads("config.num_attention_heads", "config.num_key_value_heads", groups="num_key_value_groups"),
        "self_attn.q_proj.linear": Column(),
        "self_attn.{k,v}_proj.linear": Column("key"),
        "self_attn.o_proj.linear": Row(),
        **{f"{path}.linear": rule for path, rule in MLP.items()},
    }


class DiffusionGemmaDecoderPolicy(Policy):
    """The decoder's embeddings, gathered at every read: the decoder multiplies the previous step's probabilities by the
    whole table."""

    block = "DiffusionGemmaDecoderModel"
    plan = {"embed_tokens": Stored()}
