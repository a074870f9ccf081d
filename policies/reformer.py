from parallelformers_ng.policies.bert import ATTENTION
from parallelformers_ng.sharding.attention import ReformerAttentionParallel
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved


class ReformerPolicy(Policy):
    """A layer with attention within a chunk of the sequence, or within buckets of equal hash, in which queries are also
    the keys."""

    block = "ReformerLayer"
    plan = {
        **moved(ATTENTION, "attention.self", "attention.self_attention"),
        "attention.self_attention": Heads(
            "num_attention_heads", scaled=("all_head_size",), layer=ReformerAttentionParallel
        ),
        "attention.self_attention.query_key": Column(),
        "feed_forward.dense.dense": Column(),
        "feed_forward.output.dense": Row(),
    }
    optional = (
        "attention.self_attention.query_key", "attention.self_attention.query", "attention.self_attention.key",
    )  # fmt: skip
