from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.sharding.rules import Column, Policy, Row, moved


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
