from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved

_DECODER_ATTENTION = {**ATTENTION, "self_attn": Heads("config.decoder_attention_heads")}


class DetrEncoderPolicy(Policy):
    """DETR's encoder layer, which adds positions to the inputs of the q and k projections. The backbone stays whole.
    RT-DETR has encoder layers only over the coarsest level of the backbone's features."""

    block = (
        "DetrEncoderLayer", "RTDetrEncoderLayer", "RTDetrV2EncoderLayer", "PPDocLayoutV2EncoderLayer",
        "PPDocLayoutV3EncoderLayer", "PPDocLayoutV4EncoderLayer",
    )  # fmt: skip
    plan = {**ATTENTION, "self_attn": Heads("config.encoder_attention_heads"), "mlp.fc1": Column(), "mlp.fc2": Row()}


class DetrDecoderPolicy(DetrEncoderPolicy):
    """DETR's decoder layer. Its inputs are object queries, one for each object that may be in the image."""

    block = "DetrDecoderLayer"
    plan = {**DetrEncoderPolicy.plan, **_DECODER_ATTENTION, **moved(_DECODER_ATTENTION, "self_attn", "encoder_attn")}


class DetrBoxPolicy(Policy):
    """The MLP that predicts the corners of a box."""

    block = (
        "DetrMLPPredictionHead", "GroundingDinoMLPPredictionHead", "MMGroundingDinoMLPPredictionHead",
        "RTDetrMLPPredictionHead", "RTDetrV2MLPPredictionHead", "DFineMLPPredictionHead",
        "PPDocLayoutV2MLPPredictionHead", "PPDocLayoutV3MLPPredictionHead", "PPDocLayoutV4MLPPredictionHead",
    )  # fmt: skip
    plan = {"layers.0": Column(gather=True), "layers.1": Column(gather=True)}


class RTDetrDecoderPolicy(DetrDecoderPolicy):
    """DETR's decoder layer with deformable attention to the image, which `GroundingDinoDeformablePolicy` cuts."""

    block = (
        "RTDetrDecoderLayer", "RTDetrV2DecoderLayer",
        "PPDocLayoutV2DecoderLayer", "PPDocLayoutV3DecoderLayer", "PPDocLayoutV4DecoderLayer",
    )  # fmt: skip
    plan = {**DetrEncoderPolicy.plan, **_DECODER_ATTENTION}


class DFineEncoderPolicy(Policy):
    """RT-DETR's encoder layer. `DFineMLPPolicy` cuts its MLP, which keeps layers in a list."""

    block = ("DFineEncoderLayer", "Deimv2EncoderLayer")
    plan = {**ATTENTION, "self_attn": Heads("config.num_attention_heads")}


class DFineDecoderPolicy(DFineEncoderPolicy):
    """RT-DETR's decoder layer with a gate instead of a residual. The gate splits its outputs in two halves, so each
    rank needs all outputs."""

    block = ("DFineDecoderLayer", "Deimv2DecoderLayer")
    plan = {**_DECODER_ATTENTION, "gateway.gate": Column(gather=True)}
    optional = ("gateway",)


class DFineMLPPolicy(Policy):
    """An MLP of two layers in a block, or of three layers that predict the distributions of a box's edges."""

    block = ("DFineMLP", "Deimv2MLP")
    plan = {"layers.0": Column(), "layers.1": Row(), "layers.2": Column(gather=True)}
    optional = ("layers.2",)
