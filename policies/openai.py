from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class OpenAIGPTPolicy(Policy):
    """The first GPT's block. `c_attn` packs q, k and v side by side, as in GPT-2."""

    block = "openai.Block"
    plan = {
        "attn": Heads("n_head", scaled=("split_size",)),
        "attn.c_attn": Column(fused=3),
        "attn.c_proj": Row(),
        "mlp.c_fc": Column(),
        "mlp.c_proj": Row(),
    }
