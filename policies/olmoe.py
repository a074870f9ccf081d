from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy
from parallelformers_ng.sharding.rules import Experts, Norm


class OlmoePolicy(LlamaPolicy):
    """Llama's attention with norms over all heads of q, and over all heads of k; and routed experts."""

    block = ("OlmoeDecoderLayer", "FlexOlmoDecoderLayer", "MiniMaxM2DecoderLayer")
    plan = {
        **ATTENTION,
        "self_attn.q_norm": Norm("query"),
        "self_attn.k_norm": Norm("key"),
        "mlp.experts": Experts(),
    }
