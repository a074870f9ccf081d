from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved


class MoonshinePolicy(Policy):
    """Encoder and decoder layers over raw audio. The decoder's feed-forward packs up and gate side by side.

    The numbers of query heads and key/value heads must be equal, because the forward shapes q by the number of
    key/value heads.
    """

    block = "MoonshineEncoderLayer"
    plan = {
        **ATTENTION,
        "self_attn": Heads(
            "config.num_key_value_heads", groups="num_key_value_groups", scaled=("config.num_key_value_heads",)
        ),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }


class MoonshineDecoderPolicy(Policy):
    """The decoder layer with self-attention and cross-attention to the audio."""

    block = "MoonshineDecoderLayer"
    plan = {
        **MoonshinePolicy.plan,
        **moved(MoonshinePolicy.plan, "self_attn", "encoder_attn"),
        "mlp.fc1": Column(fused=2),
    }
