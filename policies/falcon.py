from parallelformers_ng.policies.gpt_neox import GPTNeoXPolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, moved


class FalconPolicy(Policy):
    """Falcon's block in all three generations: attention with q, k and v per head, multi-query, or grouped. The
    projection packs q, k and v for each key/value head.

    The model computes ALiBi for all heads, as an argument or added to the mask.
    """

    block = "FalconDecoderLayer"
    plan = {
        **moved(GPTNeoXPolicy.plan, "attention", "self_attention"),
        "self_attention": Heads(
            "num_heads", "num_kv_heads", scaled=("hidden_size", "split_size"), biases=("alibi", "attention_mask")
        ),
        "self_attention.query_key_value": Column(interleaved=("query", "key", "key")),
    }
