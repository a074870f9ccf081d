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
