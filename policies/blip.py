from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy
from parallelformers_ng.policies.clip import CLIPProjectionPolicy
from parallelformers_ng.sharding.rules import Column, Policy, Row


class BlipVisionPolicy(Policy):
    """The layer of the vision tower, here and in BLIP-2 and InstructBLIP.

    The forward takes the width of a head from the hidden state's, so attention runs whole on gathered projections.
    """

    block = (
        "BlipEncoderLayer", "Blip2EncoderLayer", "InstructBlipEncoderLayer", "InstructBlipVideoEncoderLayer",
    )  # fmt: skip
    plan = {
        "self_attn.qkv": Column(gather=True),
        "self_attn.projection": Column(gather=True),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }


class BlipTextPolicy(BertPolicy):
    """BERT's block with cross-attention to the image."""

    block = "BlipTextLayer"


class BlipTextHeadPolicy(BertHeadPolicy):
    """The layers in front of the heads."""

    block = ("BlipTextPredictionHeadTransform", "BlipTextPooler")


class BlipProjectionPolicy(CLIPProjectionPolicy):
    """From both towers into the space that they share."""

    block = "BlipModel"
