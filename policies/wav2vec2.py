from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.sharding.attention import WavLMAttentionParallel
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice, moved


class Wav2Vec2Policy(Policy):
    """The encoder layer of most models over raw audio, with norms after, or in "stable" layers before, attention and
    feed-forward.

    The massively multilingual checkpoints also have an adapter. The convolutions before the encoder stay whole.
    """

    block = (
        "Wav2Vec2EncoderLayer", "Wav2Vec2EncoderLayerStableLayerNorm",
        "HubertEncoderLayer", "HubertEncoderLayerStableLayerNorm",
        "UniSpeechEncoderLayer", "UniSpeechEncoderLayerStableLayerNorm",
        "UniSpeechSatEncoderLayer", "UniSpeechSatEncoderLayerStableLayerNorm",
        "Data2VecAudioEncoderLayer", "SEWEncoderLayer",
    )  # fmt: skip
    plan = {
        **moved(ATTENTION, "self_attn", "attention"),
        "feed_forward.intermediate_dense": Column(),
        "feed_forward.output_dense": Row(),
        "adapter_layer.linear_1": Column(),
        "adapter_layer.linear_2": Row(),
    }
    optional = ("adapter_layer",)


class WavLMPolicy(Policy):
    """Wav2Vec2's layers with a relative position bias that each head gates. All layers use the first layer's bias."""

    block = ("WavLMEncoderLayer", "WavLMEncoderLayerStableLayerNorm")
    plan = {
        **Wav2Vec2Policy.plan,
        "attention": Heads("num_heads", scaled=("embed_dim",), layer=WavLMAttentionParallel),
        "attention.gru_rel_pos_const": Slice(1),
        "attention.rel_attn_embed": Column(),
    }
    optional = ("adapter_layer",)
