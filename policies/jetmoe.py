from parallelformers_ng.sharding.rules import Column, Policy, Row


class JetMoePolicy(Policy):
    """A block with experts in the feed-forward and in the attention. The attention's experts project queries and
    outputs. Each rank computes a part of each projection, and all heads."""

    block = "JetMoeDecoderLayer"
    plan = {
        "mlp.input_linear": Column(fused=2),
        "mlp.output_linear": Row(),
        "self_attention.experts.{input,output}_linear": Column("column", gather=True),
        "self_attention.kv_proj": Column("column", gather=True),
    }
