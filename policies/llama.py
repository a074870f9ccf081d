from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved

HEADS = {
    "self_attn": Heads("config.num_attention_heads", "config.num_key_value_heads", groups="num_key_value_groups"),
    "self_attn.q_proj": Column(),
    "self_attn.{k,v}_proj": Column("key"),
}
ATTENTION = {**HEADS, "self_attn.o_proj": Row()}
MLP = {"mlp.gate_proj": Column(), "mlp.up_proj": Column(), "mlp.down_proj": Row()}


class LlamaPolicy(Policy):
    """A block with grouped-query attention and a gated MLP, the layout of most later decoders.

    The blocks differ in what needs no rule: biases of q, k and v, places of norms, a norm that all heads of q or of k
    share, wider heads, multipliers, capped scores, positions, and windows in the mask.
    """

    block = (
        "LlamaDecoderLayer", "Cohere2DecoderLayer", "Exaone4DecoderLayer", "GemmaDecoderLayer", "Gemma2DecoderLayer",
        "Gemma3DecoderLayer", "GraniteDecoderLayer", "HeliumDecoderLayer", "HunYuanDenseV1DecoderLayer",
        "MinistralDecoderLayer", "Ministral3DecoderLayer", "MistralDecoderLayer", "OlmoDecoderLayer",
        "Qwen2DecoderLayer", "Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer", "Qwen3DecoderLayer",
        "Qwen3VLTextDecoderLayer", "SeedOssDecoderLayer", "SmolLM3DecoderLayer",
    )  # fmt: skip
    plan = {**ATTENTION, **MLP}


class LlamaMoEPolicy(LlamaPolicy):
    """Llama's block in models whose later layers have experts instead of the MLP; another policy cuts the experts."""

    block = (
        "DeepseekOcr2VisionEncoderLayer", "DeepseekOcr2TextDecoderLayer", "Ernie4_5DecoderLayer",
        "Ernie4_5_MoeDecoderLayer", "Glm4MoeDecoderLayer", "Glm4vMoeTextDecoderLayer", "HunYuanMoEV1DecoderLayer",
        "UnlimitedOcrTextDecoderLayer",
    )  # fmt: skip
    optional = ("mlp",)


class LlamaAttentionPolicy(Policy):
    """Llama's attention as a block of its own, in models that mix it with other layers."""

    block = ("MiniMaxAttention", "NemotronHAttention")
    plan = moved(ATTENTION, "self_attn", "")


class LlamaMLPPolicy(Policy):
    """Llama's MLP as a block of its own: in RecurrentGemma and DEIMv2, and in DiffusionGemma over the predictions of
    the previous denoising step."""

    block = ("RecurrentGemmaMlp", "Deimv2SwiGLUFFN", "DiffusionGemmaSelfConditioning")
    plan = moved(MLP, "mlp", "")
