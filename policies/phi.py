from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class PhiPolicy(Policy):
    """Llama's attention with a biased output layer `dense`, beside an ungated MLP. All heads share the norm of q and
    the norm of k."""

    block = "PhiDecoderLayer"
    plan = {
        "self_attn": Heads("config.num_attention_heads", "config.num_key_value_heads", groups="num_key_value_groups"),
        "self_attn.q_proj": Column(),
        "self_attn.k_proj": Column("key"),
        "self_attn.v_proj": Column("key"),
        "self_attn.dense": Row(),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }
