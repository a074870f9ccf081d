from parallelformers_ng.policies.deepseek_v2 import DeepseekV2MoEPolicy
from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.policies.sam import SamMLPPolicy, SamVisionPolicy


class DeepseekOcr2Policy(LlamaPolicy):
    """Llama's layer, in the encoder of queries and patches and in the decoder. Most decoder layers have experts."""

    block = ("DeepseekOcr2VisionEncoderLayer", "DeepseekOcr2TextDecoderLayer")
    optional = ("mlp",)


class DeepseekOcr2MoEPolicy(DeepseekV2MoEPolicy):
    """DeepSeek V2's experts in DeepSeek-OCR 2."""

    block = "DeepseekOcr2TextMoe"


class DeepseekOcr2SamPolicy(SamVisionPolicy):
    """SAM's vision layer, in the tower that reads the image first."""

    block = "DeepseekOcr2SamVisionLayer"


class DeepseekOcr2SamMLPPolicy(SamMLPPolicy):
    """SAM's MLP in DeepSeek-OCR 2."""

    block = "DeepseekOcr2SamMLPBlock"
