from parallelformers_ng.policies.llama import LlamaPolicy


class Gemma2Policy(LlamaPolicy):
    """Llama's block with norms before and after attention and MLP, and capped scores. Every second layer attends to a
    window, which the mask contains."""

    block = "Gemma2DecoderLayer"
