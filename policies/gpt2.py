from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved

ATTENTION = {
    "attn": Heads(query="num_heads", scaled=("embed_dim", "split_size")),
    "attn.c_attn": Column(fused=3),
    "attn.c_proj": Row(),
}
MLP = {"mlp.c_fc": Column(), "mlp.c_proj": Row()}


class GPT2Policy(Policy):
    """GPT-2's block. `c_attn` packs q, k and v side by side, and each third is cut separately. The cross-attention's
    `c_attn` packs k and v."""

    block = "GPT2Block"
    plan = {
        **ATTENTION,
        **moved(ATTENTION, "attn", "crossattention"),
        "crossattention.q_attn": Column(),
        "crossattention.c_attn": Column(fused=2),
        **MLP,
    }
    optional = ("crossattention",)


class OpenAIGPTPolicy(Policy):
    """The first GPT's block. `c_attn` packs q, k and v side by side, as in GPT-2."""

    block = "openai.Block"
    plan = {**ATTENTION, "attn": Heads("n_head", scaled=("split_size",)), **MLP}


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
