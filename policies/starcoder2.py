from parallelformers_ng.policies.gpt2 import MLP
from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy


class Starcoder2Policy(LlamaPolicy):
    """Llama's attention with biases, and an ungated MLP."""

    block = "Starcoder2DecoderLayer"
    plan = {**ATTENTION, **MLP}
