from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.policies.gpt2 import MLP
from parallelformers_ng.sharding.rules import Policy, moved


class GPTNeoPolicy(Policy):
    """GPT-Neo's block with global or local attention. The window of local attention is in a mask that all heads
    share."""

    block = "GPTNeoBlock"
    plan = {**moved(ATTENTION, "self_attn", "attn.attention"), **MLP}
