from parallelformers_ng.policies.llama import LlamaPolicy


class GranitePolicy(LlamaPolicy):
    """Llama's block with multipliers on the scores and on what is added to the residual."""

    block = "GraniteDecoderLayer"
