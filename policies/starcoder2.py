from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Row


class Starcoder2Policy(LlamaPolicy):
    """Llama's attention with biases, and an ungated MLP."""

    block = "Starcoder2DecoderLayer"
    plan = {
        **ATTENTION,
        "mlp.c_fc": Column(),
        "mlp.c_proj": Row(),
    }
