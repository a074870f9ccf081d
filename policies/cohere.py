from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Slice


class CoherePolicy(LlamaPolicy):
    """Attention and MLP side by side. If q and k have norms, each head has weights of its own."""

    block = "CohereDecoderLayer"
    plan = {**LlamaPolicy.plan, "self_attn.q_norm.weight": Slice(0), "self_attn.k_norm.weight": Slice(0, "key")}
    optional = ("self_attn.q_norm", "self_attn.k_norm")


class Cohere2Policy(LlamaPolicy):
    """Cohere's block without these norms; most layers look at a window, which is in the mask."""

    block = "Cohere2DecoderLayer"
