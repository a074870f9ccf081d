from parallelformers_ng.policies.llama import LlamaPolicy


class Gemma3Policy(LlamaPolicy):
    """Llama's block with norms before and after attention and MLP, and a norm per head on q and k. `SiglipPolicy` cuts
    the vision tower."""

    block = "Gemma3DecoderLayer"
