from parallelformers_ng.policies.llama import LlamaPolicy


class MistralPolicy(LlamaPolicy):
    """Llama's block in Mistral. The mask contains the sliding window."""

    block = "MistralDecoderLayer"
