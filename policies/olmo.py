from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Experts, Norm


class Olmo2Policy(LlamaPolicy):
    """Llama's layers with norms over all heads of q and over all heads of k. Some layers attend to a window; some
    models have routed experts instead of the MLP."""

    block = (
        "Olmo2DecoderLayer", "Olmo3DecoderLayer", "OlmoeDecoderLayer", "FlexOlmoDecoderLayer", "MiniMaxM2DecoderLayer",
    )  # fmt: skip
    plan = {
        **LlamaPolicy.plan,
        "self_attn.q_norm": Norm("query"),
        "self_attn.k_norm": Norm("key"),
        "mlp.experts": Experts(),
    }
    optional = ("mlp",)
