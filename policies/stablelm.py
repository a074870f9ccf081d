from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import HeadNorms, Heads


class StableLmPolicy(LlamaPolicy):
    """Llama's block with partial rotary positions. In the 12B model each head of q and k has its own norm."""

    block = "StableLmDecoderLayer"
    plan = {
        **LlamaPolicy.plan,
        "self_attn": Heads("num_heads", "num_key_value_heads", groups="num_key_value_groups", scaled=("hidden_size",)),
        "self_attn.q_layernorm": HeadNorms("query"),
        "self_attn.k_layernorm": HeadNorms("key"),
    }
    optional = ("self_attn.q_layernorm", "self_attn.k_layernorm")
