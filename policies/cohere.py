from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Slice


class CoherePolicy(LlamaPolicy):
    """A block in which attention and MLP read the same input, and their outputs are added. If q and k have norms, each
    head has its own norm weights."""

    block = "CohereDecoderLayer"
    plan = {**LlamaPolicy.plan, "self_attn.q_norm.weight": Slice(0), "self_attn.k_norm.weight": Slice(0, "key")}
    optional = ("self_attn.q_norm", "self_attn.k_norm")
