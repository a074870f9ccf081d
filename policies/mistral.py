from parallelformers_ng.policies.llama import LlamaPolicy


class MistralPolicy(LlamaPolicy):
    """Llama's block under another name; the sliding window is in the mask."""

    block = "MistralDecoderLayer"
