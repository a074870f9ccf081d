from parallelformers_ng.policies.clip import CLIPPolicy
from parallelformers_ng.policies.deepseek_v2 import DeepseekV2MoEPolicy
from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.policies.sam import SamMLPPolicy, SamVisionPolicy


class UnlimitedOcrPolicy(LlamaPolicy):
    """Llama's layer in the decoder. Most decoder layers have experts."""

    block = "UnlimitedOcrTextDecoderLayer"
    optional = ("mlp",)


class UnlimitedOcrMoEPolicy(DeepseekV2MoEPolicy):
    """DeepSeek V2's experts in Unlimited-OCR."""

    block = "UnlimitedOcrTextMoe"


class UnlimitedOcrVisionPolicy(CLIPPolicy):
    """CLIP's layer, in the tower that reads the output of the SAM tower."""

    block = "UnlimitedOcrEncoderLayer"


class UnlimitedOcrSamPolicy(SamVisionPolicy):
    """SAM's vision layer, in the tower that reads the image first."""

    block = "UnlimitedOcrSamVisionLayer"


class UnlimitedOcrSamMLPPolicy(SamMLPPolicy):
    """SAM's MLP in Unlimited-OCR."""

    block = "UnlimitedOcrSamMLPBlock"
