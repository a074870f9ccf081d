from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class XLMAttentionPolicy(Policy):
    """XLM's attention; the model keeps attentions and feed-forwards in separate lists. In a decoder, XLM may have
    cross-attention. `SamMLPPolicy` cuts the feed-forwards."""

    block = ("xlm.MultiHeadAttention", "flaubert.MultiHeadAttention")
    plan = {"": Heads("n_heads"), "q_lin": Column(), "k_lin": Column(), "v_lin": Column(), "out_lin": Row()}
