from parallelformers_ng.policies.bert import ATTENTION, MLP, BertPolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved

WINDOW_ATTENTION = {
    **ATTENTION,
    "attention.self": Heads("num_heads", weights_dim=2, more_weights=((2, 1),), input_width=True),
    "attention.self.{query,key,value}_global": Column(),
}


class LongformerPolicy(BertPolicy):
    """BERT's block with attention to a window. Tokens that attend to the whole sequence have separate projections."""

    block = "LongformerLayer"
    plan = {**WINDOW_ATTENTION, **MLP}


_ATTENTION = moved(WINDOW_ATTENTION, "attention.output.dense", "self_attn.output")


class LEDEncoderPolicy(Policy):
    """Longformer's attention in BART's encoder layer."""

    block = "LEDEncoderLayer"
    plan = {**moved(_ATTENTION, "attention.self", "self_attn.longformer_self_attn"), "fc1": Column(), "fc2": Row()}
