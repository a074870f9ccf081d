from parallelformers_ng.policies.llama import LlamaPolicy


class SmolLM3Policy(LlamaPolicy):
    """Llama's block. Every fourth layer has no rotary positions."""

    block = "SmolLM3DecoderLayer"
