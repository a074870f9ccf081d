from parallelformers_ng.policies.llama import LlamaPolicy


class Gemma2Policy(LlamaPolicy):
    """Llama's block between norms; every other layer looks at a window, which is in the mask, and scores are capped."""

    block = "Gemma2DecoderLayer"
