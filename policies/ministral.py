from parallelformers_ng.policies.llama import LlamaPolicy


class MinistralPolicy(LlamaPolicy):
    """Llama's block. Some layers attend to a window, which the mask contains."""

    block = ("MinistralDecoderLayer", "Ministral3DecoderLayer")
