from parallelformers_ng.policies.detr import DetrDecoderPolicy, DetrEncoderPolicy
from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy


class RTDetrDecoderPolicy(DetrDecoderPolicy):
    """DETR's decoder layer with deformable attention to the image, which `GroundingDinoDeformablePolicy` cuts."""

    block = (
        "RTDetrDecoderLayer", "RTDetrV2DecoderLayer",
        "PPDocLayoutV2DecoderLayer", "PPDocLayoutV3DecoderLayer", "PPDocLayoutV4DecoderLayer",
    )  # fmt: skip
    plan = {**DetrEncoderPolicy.plan, **ATTENTION, "self_attn": Heads("config.decoder_attention_heads")}


class RTDetrProjectionPolicy(Policy):
    """The projection of the encoder's output, from which the decoder's queries are chosen; also in D-FINE and
    DEIMv2."""

    block = (
        "RTDetrModel", "RTDetrV2Model", "DFineModel", "Deimv2Model",
        "PPDocLayoutV2Model", "PPDocLayoutV3Model", "PPDocLayoutV4Model",
    )  # fmt: skip
    plan = {"enc_output.0": Column(gather=True)}


class PPDocLayoutOrderPolicy(Policy):
    """The heads that predict the reading order of a page's parts. The forward uses only the last projection of each
    list."""

    block = ("PPDocLayoutV4SuccessorOrderHead", "PPDocLayoutV4RelativeOrderHead")
    plan = {"proj.*": Column(gather=True)}
