from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Experts, Policy


class MuseSparkPolicy(LlamaPolicy):
    """Llama's layer with norms of each head's output, and a gate as wide as the queries. Most layers have experts."""

    block = "MuseSparkTextDecoderLayer"
    plan = {**LlamaPolicy.plan, "self_attn.gate_proj": Column()}
    optional = ("mlp",)


class MuseSparkMoEPolicy(Policy):
    """Experts with a separate width. Each expert's output is normalised, so the ranks sum it before the norm."""

    block = "MuseSparkMoE"
    plan = {"pre_expert_proj": Column(gather=True), "experts": Experts(), "post_expert_proj": Column(gather=True)}
