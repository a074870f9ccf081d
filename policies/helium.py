from parallelformers_ng.policies.llama import LlamaPolicy


class HeliumPolicy(LlamaPolicy):
    """Llama's block in Helium."""

    block = "HeliumDecoderLayer"
