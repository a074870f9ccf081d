from parallelformers_ng.policies.wav2vec2 import CTCHeadPolicy, Wav2Vec2Policy, Wav2Vec2ProjectionPolicy
from parallelformers_ng.sharding.attention import WavLMAttentionParallel
from parallelformers_ng.sharding.rules import Column, Heads, Slice


class WavLMPolicy(Wav2Vec2Policy):
    """Wav2Vec2's layers with a relative position bias that each head gates. All layers use the first layer's bias."""

    block = ("WavLMEncoderLayer", "WavLMEncoderLayerStableLayerNorm")
    plan = {
        **Wav2Vec2Policy.plan,
        "attention": Heads("num_heads", scaled=("embed_dim",), layer=WavLMAttentionParallel),
        "attention.gru_rel_pos_const": Slice(1),
        "attention.rel_attn_embed": Column(),
    }


class WavLMProjectionPolicy(Wav2Vec2ProjectionPolicy):
    """The projection from the width of the convolutions to that of the encoder."""

    block = "WavLMFeatureProjection"


class WavLMHeadPolicy(CTCHeadPolicy):
    """The output head over characters."""

    block = "WavLMForCTC"
