from parallelformers_ng.policies.llama import LlamaPolicy


class Qwen3Policy(LlamaPolicy):
    """Llama's block with a norm per head on q and k, which every rank applies to its own heads."""

    block = "Qwen3DecoderLayer"
