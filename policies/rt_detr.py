from parallelformers_ng.policies.detr import DetrBoxPolicy, DetrDecoderPolicy, DetrEncoderPolicy
from parallelformers_ng.policies.grounding_dino import GroundingDinoDeformablePolicy
from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy


class RTDetrEncoderPolicy(DetrEncoderPolicy):
    """DETR's layer, over the coarsest level of the backbone's features alone."""

    block = (
        "RTDetrEncoderLayer", "RTDetrV2EncoderLayer",
        "PPDocLayoutV2EncoderLayer", "PPDocLayoutV3EncoderLayer", "PPDocLayoutV4EncoderLayer",
    )  # fmt: skip


class RTDetrDecoderPolicy(DetrDecoderPolicy):
    """DETR's layer. It looks at the image with deformable attention, for which there is another policy."""

    block = (
        "RTDetrDecoderLayer", "RTDetrV2DecoderLayer",
        "PPDocLayoutV2DecoderLayer", "PPDocLayoutV3DecoderLayer", "PPDocLayoutV4DecoderLayer",
    )  # fmt: skip
    plan = {**DetrEncoderPolicy.plan, **ATTENTION, "self_attn": Heads("config.decoder_attention_heads")}


class RTDetrDeformablePolicy(GroundingDinoDeformablePolicy):
    """Grounding DINO's deformable attention."""

    block = (
        "RTDetrMultiscaleDeformableAttention", "RTDetrV2MultiscaleDeformableAttention",
        "PPDocLayoutV2MultiscaleDeformableAttention", "PPDocLayoutV3MultiscaleDeformableAttention",
        "PPDocLayoutV4MultiscaleDeformableAttention",
    )  # fmt: skip


class RTDetrProjectionPolicy(Policy):
    """The projection of the encoder's output, from which the decoder's queries are chosen. D-FINE and DEIMv2 do the
    same."""

    block = (
        "RTDetrModel", "RTDetrV2Model", "DFineModel", "Deimv2Model",
        "PPDocLayoutV2Model", "PPDocLayoutV3Model", "PPDocLayoutV4Model",
    )  # fmt: skip
    plan = {"enc_output.0": Column(gather=True)}


class RTDetrBoxPolicy(DetrBoxPolicy):
    """The MLPs that predict boxes, and those that make queries' positions of them."""

    block = (
        "RTDetrMLPPredictionHead", "RTDetrV2MLPPredictionHead", "DFineMLPPredictionHead",
        "PPDocLayoutV2MLPPredictionHead", "PPDocLayoutV3MLPPredictionHead", "PPDocLayoutV4MLPPredictionHead",
    )  # fmt: skip


class PPDocLayoutOrderPolicy(Policy):
    """The heads that say in which order the parts of a page are read: of each list of projections the last is used."""

    block = ("PPDocLayoutV4SuccessorOrderHead", "PPDocLayoutV4RelativeOrderHead")
    plan = {"proj.*": Column(gather=True)}
