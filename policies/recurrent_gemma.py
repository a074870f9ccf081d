from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice, moved


class RecurrentGemmaPolicy(Policy):
    """Griffin's recurrent layer. Its gates are block-diagonal with one block per head, and the module keeps the
    state."""

    block = "RecurrentGemmaRecurrentBlock"
    plan = {
        # The forward reads `hidden_size` only to make a new recurrent state, if a prompt has a single token.
        "": Heads(
            "rg_lru.num_attention_heads",
            scaled=("lru_width", "hidden_size"),
            fresh=("conv1d_state", "rg_lru.recurrent_states"),
        ),
        "{linear_x,linear_y,conv_1d}": Column(),
        "rg_lru.recurrent_param": Slice(0),
        "rg_lru.{input,recurrent}_gate_{weight,bias}": Slice(0),
        "linear_out": Row(),
    }


class RecurrentGemmaAttentionPolicy(Policy):
    """Multi-query attention over a window."""

    block = "RecurrentGemmaAttention"
    plan = {
        **moved(ATTENTION, "self_attn", ""),
        "": Heads("num_attention_heads", "num_key_value_heads", groups="num_key_value_groups"),
    }
