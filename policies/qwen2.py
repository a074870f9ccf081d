from parallelformers_ng.policies.llama import LlamaPolicy


class Qwen2Policy(LlamaPolicy):
    """Llama's block with biases on q, k and v."""

    block = "Qwen2DecoderLayer"
