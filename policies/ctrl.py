from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class CTRLPolicy(Policy):
    """A decoder block like GPT's, with separate projections of q, k and v."""

    block = "ctrl.EncoderLayer"
    plan = {
        "multi_head_attention": Heads("num_heads"),
        "multi_head_attention.{Wq,Wk,Wv}": Column(),
        "multi_head_attention.dense": Row(),
        "ffn.0": Column(),
        "ffn.2": Row(),
    }
