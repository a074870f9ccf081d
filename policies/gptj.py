from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved


class GPTJPolicy(Policy):
    """GPT-J's block, which adds attention and MLP of the same norm's output. The ranks sum attention and MLP
    separately."""

    block = "GPTJBlock"
    plan = {
        **moved(ATTENTION, "self_attn", "attn"),
        "attn": Heads("num_attention_heads", scaled=("embed_dim",)),
        "mlp.fc_in": Column(),
        "mlp.fc_out": Row(),
    }
