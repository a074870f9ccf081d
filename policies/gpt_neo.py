from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.policies.gpt2 import MLP
from parallelformers_ng.sharding.rules import Policy, moved


class GPTNeoPolicy(Policy):
    """GPT-Neo's block with global or local attention. Local attention masks tokens outside a window, alike for all
    heads."""

    block = "GPTNeoBlock"
    plan = {**moved(ATTENTION, "self_attn", "attn.attention"), **MLP}
