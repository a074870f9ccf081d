from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved


class GPTJPolicy(Policy):
    """GPT-J's block, in which attention and MLP read the output of the same norm. The ranks sum the outputs of
    attention and MLP separately."""

    block = "GPTJBlock"
    plan = {
        **moved(ATTENTION, "self_attn", "attn"),
        "attn": Heads("num_attention_heads", scaled=("embed_dim",)),
        "mlp.fc_in": Column(),
        "mlp.fc_out": Row(),
    }
