from parallelformers_ng.policies.llama import LlamaPolicy


class Exaone4Policy(LlamaPolicy):
    """Llama's block with norms after attention and MLP, and a norm per head on q and k."""

    block = "Exaone4DecoderLayer"
