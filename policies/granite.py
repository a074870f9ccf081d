from parallelformers_ng.policies.llama import LlamaPolicy


class GranitePolicy(LlamaPolicy):
    """Llama's block with multipliers on the scores and on the outputs of attention and MLP."""

    block = "GraniteDecoderLayer"
