from typing import ClassVar

from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved

_DECODER_ATTENTION = {**ATTENTION, "self_attn": Heads("config.decoder_attention_heads")}


class DetrEncoderPolicy(Policy):
    """DETR's encoder layer, which adds positions to the inputs of the q and k projections. The backbone stays whole.
    RT-DETR has encoder layers only over the coarsest level of the backbone's features."""

    block: ClassVar[str | tuple[str, ...]] = (
        "DetrEncoderLayer", "RTDetrEncoderLayer", "RTDetrV2EncoderLayer", "PPDocLayoutV2EncoderLayer",
        "PPDocLayoutV3EncoderLayer", "PPDocLayoutV4EncoderLayer",
    )  # fmt: skip
    plan = {**ATTENTION, "self_attn": Heads("config.encoder_attention_heads"), "mlp.fc1": Column(), "mlp.fc2": Row()}


class DetrDecoderPolicy(DetrEncoderPolicy):
    """DETR's decoder layer, over one query for each possible object."""

    block: ClassVar[str | tuple[str, ...]] = "DetrDecoderLayer"
    plan = {**DetrEncoderPolicy.plan, **_DECODER_ATTENTION, **moved(_DECODER_ATTENTION, "self_attn", "encoder_attn")}


class DetrBoxPolicy(Policy):
    """The MLP that predicts the corners of a box."""

    block = (
        "DetrMLPPredictionHead", "GroundingDinoMLPPredictionHead", "MMGroundingDinoMLPPredictionHead",
        "RTDetrMLPPredictionHead", "RTDetrV2MLPPredictionHead", "DFineMLPPredictionHead",
        "PPDocLayoutV2MLPPredictionHead", "PPDocLayoutV3MLPPredictionHead", "PPDocLayoutV4MLPPredictionHead",
    )  # fmt: skip
    plan = {"layers.0": Column(gather=True), "layers.1": Column(gather=True)}
