from parallelformers_ng.policies.llama import LlamaPolicy


class GemmaPolicy(LlamaPolicy):
    """Llama's block with heads wider than `hidden_size / num_attention_heads`."""

    block = "GemmaDecoderLayer"
