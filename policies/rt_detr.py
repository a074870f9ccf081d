from parallelformers_ng.policies.detr import DetrBoxPolicy, DetrDecoderPolicy, DetrEncoderPolicy
from parallelformers_ng.policies.grounding_dino import GroundingDinoDeformablePolicy
from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy


class RTDetrEncoderPolicy(DetrEncoderPolicy):
    """DETR's encoder layer, only over the coarsest level of the backbone's features."""

    block = (
        "RTDetrEncoderLayer", "RTDetrV2EncoderLayer",
        "PPDocLayoutV2EncoderLayer", "PPDocLayoutV3EncoderLayer", "PPDocLayoutV4EncoderLayer",
    )  # fmt: skip


class RTDetrDecoderPolicy(DetrDecoderPolicy):
    """DETR's decoder layer with deformable attention to the image, which `RTDetrDeformablePolicy` cuts."""

    block = (
        "RTDetrDecoderLayer", "RTDetrV2DecoderLayer",
        "PPDocLayoutV2DecoderLayer", "PPDocLayoutV3DecoderLayer", "PPDocLayoutV4DecoderLayer",
    )  # fmt: skip
    plan = {**DetrEncoderPolicy.plan, **ATTENTION, "self_attn": Heads("config.decoder_attention_heads")}


class RTDetrDeformablePolicy(GroundingDinoDeformablePolicy):
    """Grounding DINO's deformable attention in RT-DETR."""

    block = (
        "RTDetrMultiscaleDeformableAttention", "RTDetrV2MultiscaleDeformableAttention",
        "PPDocLayoutV2MultiscaleDeformableAttention", "PPDocLayoutV3MultiscaleDeformableAttention",
        "PPDocLayoutV4MultiscaleDeformableAttention",
    )  # fmt: skip


class RTDetrProjectionPolicy(Policy):
    """The projection of the encoder's output, from which the decoder's queries are chosen; also in D-FINE and
    DEIMv2."""

    block = (
        "RTDetrModel", "RTDetrV2Model", "DFineModel", "Deimv2Model",
        "PPDocLayoutV2Model", "PPDocLayoutV3Model", "PPDocLayoutV4Model",
    )  # fmt: skip
    plan = {"enc_output.0": Column(gather=True)}


class RTDetrBoxPolicy(DetrBoxPolicy):
    """The MLPs that predict boxes, and the MLPs that compute query positions from boxes."""

    block = (
        "RTDetrMLPPredictionHead", "RTDetrV2MLPPredictionHead", "DFineMLPPredictionHead",
        "PPDocLayoutV2MLPPredictionHead", "PPDocLayoutV3MLPPredictionHead", "PPDocLayoutV4MLPPredictionHead",
    )  # fmt: skip


class PPDocLayoutOrderPolicy(Policy):
    """The heads that predict the reading order of a page's parts. The forward uses only the last projection of each
    list."""

    block = ("PPDocLayoutV4SuccessorOrderHead", "PPDocLayoutV4RelativeOrderHead")
    plan = {"proj.*": Column(gather=True)}
