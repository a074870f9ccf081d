from parallelformers_ng.policies.llama import LlamaPolicy


class OlmoPolicy(LlamaPolicy):
    """Llama's block with norms without weights. Some configurations clip q, k and v."""

    block = "OlmoDecoderLayer"
