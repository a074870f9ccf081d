from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Experts, Row


class Qwen2MoePolicy(LlamaPolicy):
    """Llama's attention with routed experts and a shared expert, or with a plain MLP in some configurations."""

    block = "Qwen2MoeDecoderLayer"
    plan = {
        **LlamaPolicy.plan,
        "mlp.experts": Experts(),
        "mlp.shared_expert.gate_proj": Column(),
        "mlp.shared_expert.up_proj": Column(),
        "mlp.shared_expert.down_proj": Row(),
    }
    optional = ("mlp",)
