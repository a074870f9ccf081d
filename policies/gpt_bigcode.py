from parallelformers_ng.policies.gpt2 import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Heads, Policy


class GPTBigCodePolicy(Policy):
    """GPT-BigCode's block. With multi-query attention, `c_attn` packs all query heads, one k and one v. Otherwise, it
    packs q, k and v of each head in turn."""

    block = "GPTBigCodeBlock"
    plan = {
        **ATTENTION,
        "attn": Heads(
            "num_heads",
            "kv_heads",
            groups="num_key_value_groups",
            scaled=("embed_dim", "split_size"),
            scaled_key=("kv_dim",),
        ),
        "attn.c_attn": Column(interleaved=("query", "key", "key")),
        **MLP,
    }
