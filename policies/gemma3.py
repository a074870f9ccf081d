from parallelformers_ng.policies.llama import LlamaPolicy


class Gemma3Policy(LlamaPolicy):
    """Llama's block between norms, with a norm per head on q and k. The vision tower has the policy of SigLIP."""

    block = "Gemma3DecoderLayer"
