from parallelformers_ng.policies.llama import MLP, LlamaPolicy
from parallelformers_ng.sharding.rules import Experts, moved


class QwenMoePolicy(LlamaPolicy):
    """Llama's attention with routed experts, and in Qwen2 a shared expert; or with a plain MLP in some
    configurations."""

    block = ("Qwen2MoeDecoderLayer", "Qwen3MoeDecoderLayer", "Qwen3VLMoeTextDecoderLayer")
    plan = {**LlamaPolicy.plan, "mlp.experts": Experts(), **moved(MLP, "mlp", "mlp.shared_expert")}
    optional = ("mlp",)
