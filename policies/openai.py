from parallelformers_ng.policies.gpt2 import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Heads, Policy


class OpenAIGPTPolicy(Policy):
    """The first GPT's block. `c_attn` packs q, k and v side by side, as in GPT-2."""

    block = "openai.Block"
    plan = {**ATTENTION, "attn": Heads("n_head", scaled=("split_size",)), **MLP}
