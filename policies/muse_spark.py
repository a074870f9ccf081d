from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Experts, Policy


class MuseSparkPolicy(LlamaPolicy):
    """Llama's layer; each head is normalised, and multiplied by a gate as wide as the queries. Most have experts."""

    block = "MuseSparkTextDecoderLayer"
    plan = {**LlamaPolicy.plan, "self_attn.gate_proj": Column()}
    optional = ("mlp",)


class MuseSparkMoEPolicy(Policy):
    """Experts on a width of their own; what each gives is normalised, so it is summed over the ranks before that."""

    block = "MuseSparkMoE"
    plan = {
        "pre_expert_proj": Column(gather=True),
        "experts": Experts(),
        "post_expert_proj": Column(gather=True),
    }
