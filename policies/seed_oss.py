from parallelformers_ng.policies.llama import LlamaPolicy


class SeedOssPolicy(LlamaPolicy):
    """Llama's block with biases on q, k and v."""

    block = "SeedOssDecoderLayer"
