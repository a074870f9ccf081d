from parallelformers_ng.policies.wav2vec2 import Wav2Vec2Policy
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
