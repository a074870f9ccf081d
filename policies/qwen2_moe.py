from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Experts, Row


class Qwen2MoePolicy(LlamaPolicy):
    """Llama's attention; routed experts beside a shared one, or a plain MLP where the configuration says so."""

    block = "Qwen2MoeDecoderLayer"
    plan = {
        **LlamaPolicy.plan,
        "mlp.experts": Experts(),
        "mlp.shared_expert.gate_proj": Column(),
        "mlp.shared_expert.up_proj": Column(),
        "mlp.shared_expert.down_proj": Row(),
    }
    optional = ("mlp",)
