from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Experts


class Qwen3MoePolicy(LlamaPolicy):
    """Qwen3's attention; routed experts, or a plain MLP where the configuration says so."""

    block = "Qwen3MoeDecoderLayer"
    plan = {**LlamaPolicy.plan, "mlp.experts": Experts()}
    optional = ("mlp",)
