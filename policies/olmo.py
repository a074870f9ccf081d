from parallelformers_ng.policies.llama import LlamaPolicy


class OlmoPolicy(LlamaPolicy):
    """Llama's block with norms that have no weights; q, k and v may be clipped."""

    block = "OlmoDecoderLayer"
