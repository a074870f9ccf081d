from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Norm


class Olmo2Policy(LlamaPolicy):
    """Llama's layers, some of which attend to a window, with norms after attention and MLP, over all
    heads of q, and over all heads of k."""

    block = ("Olmo2DecoderLayer", "Olmo3DecoderLayer")
    plan = {**LlamaPolicy.plan, "self_attn.q_norm": Norm("query"), "self_attn.k_norm": Norm("key")}
