from parallelformers_ng.policies.clip import CLIPPolicy
from parallelformers_ng.policies.deepseek_v2 import DeepseekV2MoEPolicy
from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.policies.sam import SamMLPPolicy, SamVisionPolicy


class UnlimitedOcrPolicy(LlamaPolicy):
    """Llama's layer in the decoder, where most have experts."""

    block = "UnlimitedOcrTextDecoderLayer"
    optional = ("mlp",)


class UnlimitedOcrMoEPolicy(DeepseekV2MoEPolicy):
    """DeepSeek V2's experts under another name."""

    block = "UnlimitedOcrTextMoe"


class UnlimitedOcrVisionPolicy(CLIPPolicy):
    """CLIP's layer, over what the SAM tower gives."""

    block = "UnlimitedOcrEncoderLayer"


class UnlimitedOcrSamPolicy(SamVisionPolicy):
    """SAM's layer, which sees the image first."""

    block = "UnlimitedOcrSamVisionLayer"


class UnlimitedOcrSamMLPPolicy(SamMLPPolicy):
    """SAM's MLP."""

    block = "UnlimitedOcrSamMLPBlock"
