from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.policy import Column, Row


class Starcoder2Policy(LlamaPolicy):
    """Llama's attention with biases, and an ungated MLP."""

    block = "Starcoder2DecoderLayer"
    plan = {
        **{path: rule for path, rule in LlamaPolicy.plan.items() if path.startswith("self_attn")},
        "mlp.c_fc": Column(),
        "mlp.c_proj": Row(),
    }
