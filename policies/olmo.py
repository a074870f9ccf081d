from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy
from parallelformers_ng.sharding.rules import Experts, Norm

NORMS = {"self_attn.q_norm": Norm("query"), "self_attn.k_norm": Norm("key")}


class Olmo2Policy(LlamaPolicy):
    """Llama's layers, some of which attend to a window, with norms after attention and MLP, over all
    heads of q, and over all heads of k."""

    block = ("Olmo2DecoderLayer", "Olmo3DecoderLayer")
    plan = {**LlamaPolicy.plan, **NORMS}


class OlmoePolicy(LlamaPolicy):
    """Llama's attention with norms over all heads of q, and over all heads of k; and routed experts."""

    block = ("OlmoeDecoderLayer", "FlexOlmoDecoderLayer", "MiniMaxM2DecoderLayer")
    plan = {**ATTENTION, **NORMS, "mlp.experts": Experts()}
