from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Norm


class Olmo2Policy(LlamaPolicy):
    """Llama's layers with norms after attention and MLP, and norms over all heads of q, and over all heads of k."""

    block = "Olmo2DecoderLayer"
    plan = {**LlamaPolicy.plan, "self_attn.q_norm": Norm("query"), "self_attn.k_norm": Norm("key")}


class Olmo3Policy(Olmo2Policy):
    """OLMo 2's block. Some layers attend to a window, which the mask contains."""

    block = "Olmo3DecoderLayer"
