from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class MPNetPolicy(Policy):
    """BERT's block with the projections q, k, v and o in one module."""

    block = "MPNetLayer"
    plan = {
        "attention.attn": Heads("num_attention_heads", scaled=("all_head_size",)),
        "attention.attn.{q,k,v}": Column(),
        "attention.attn.o": Row(),
        "intermediate.dense": Column(),
        "output.dense": Row(),
    }


class MPNetBiasPolicy(Policy):
    """The encoder's relative position bias, shared by all layers, from a table with one column per head."""

    block = "MPNetEncoder"
    plan = {"": Heads("n_heads"), "relative_attention_bias": Column()}
