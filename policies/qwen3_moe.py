from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Experts


class Qwen3MoePolicy(LlamaPolicy):
    """Qwen3's attention with routed experts, or with a plain MLP in some configurations."""

    block = ("Qwen3MoeDecoderLayer", "Qwen3VLMoeTextDecoderLayer")
    plan = {**LlamaPolicy.plan, "mlp.experts": Experts()}
    optional = ("mlp",)
