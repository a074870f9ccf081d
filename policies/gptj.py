from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class GPTJPolicy(Policy):
    """Attention and MLP read the same norm and are added side by side; each is summed over the ranks on its own."""

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
