from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Norm


class Olmo2Policy(LlamaPolicy):
    """Llama's layers with the norms behind, and norms over all heads of q and of k together."""

    block = "Olmo2DecoderLayer"
    plan = {**LlamaPolicy.plan, "self_attn.q_norm": Norm("query"), "self_attn.k_norm": Norm("key")}


class Olmo3Policy(Olmo2Policy):
    """OLMo 2's block; some layers look at a window, which is in the mask."""

    block = "Olmo3DecoderLayer"
