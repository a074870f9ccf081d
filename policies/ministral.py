from parallelformers_ng.policies.llama import LlamaPolicy


class MinistralPolicy(LlamaPolicy):
    """Llama's block; some layers look at a window, which is in the mask."""

    block = ("MinistralDecoderLayer", "Ministral3DecoderLayer")
