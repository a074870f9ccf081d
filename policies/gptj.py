from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class GPTJPolicy(Policy):
    """GPT-J's block, which adds attention and MLP of the same norm's output. The ranks sum attention and MLP
    separately."""

    block = "GPTJBlock"
    plan = {
        "attn": Heads("num_attention_heads", scaled=("embed_dim",)),
        "attn.q_proj": Column(),
        "attn.k_proj": Column(),
        "attn.v_proj": Column(),
        "attn.out_proj": Row(),
        "mlp.fc_in": Column(),
        "mlp.fc_out": Row(),
    }
