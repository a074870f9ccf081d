from parallelformers_ng.policies.gpt_neox import GPTNeoXPolicy
from parallelformers_ng.sharding.rules import Heads, Policy, moved


class BloomPolicy(Policy):
    """BLOOM's block; `query_key_value` is interleaved per head. The model computes ALiBi for all heads, and each rank
    takes the part of its heads.

    The policy does not fit `slow_but_exact`: the forward then multiplies by weights without calling their layers, so
    ranks could not sum.
    """

    block = "BloomBlock"
    plan = {
        **moved(GPTNeoXPolicy.plan, "attention", "self_attention"),
        "self_attention": Heads("num_heads", scaled=("hidden_size", "split_size"), biases=("alibi",)),
    }
    requires = {"self_attention.slow_but_exact": False}
