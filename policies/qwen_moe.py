from parallelformers_ng.policies.llama import MLP, LlamaPolicy
from parallelformers_ng.sharding.rules import Experts, moved


class Qwen2MoePolicy(LlamaPolicy):
    """Llama's attention with routed experts and a shared expert, or with a plain MLP in some configurations."""

    block = "Qwen2MoeDecoderLayer"
    plan = {**LlamaPolicy.plan, "mlp.experts": Experts(), **moved(MLP, "mlp", "mlp.shared_expert")}
    optional = ("mlp",)


class Qwen3MoePolicy(LlamaPolicy):
    """Qwen3's attention with routed experts, or with a plain MLP in some configurations."""

    block = ("Qwen3MoeDecoderLayer", "Qwen3VLMoeTextDecoderLayer")
    plan = {**LlamaPolicy.plan, "mlp.experts": Experts()}
    optional = ("mlp",)
