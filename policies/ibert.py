from parallelformers_ng.policies.bert import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Heads, Policy, Slice


class IBertPolicy(Policy):
    """BERT's block made of layers that can compute with integers. The policy does not fit integer mode: each layer then
    scales weights by their largest value, which no rank has. Checkpoints are loaded without integer mode."""

    block = "IBertLayer"
    plan = {
        **ATTENTION,
        **MLP,
        "attention.self": Heads("num_attention_heads", scaled=("all_head_size",), weights=(0, 1)),
        "attention.self.{query,key,value}.weight_integer": Slice(0),
        "attention.output.dense.weight_integer": Slice(1, heads="attention.self"),
        "intermediate.dense.weight_integer": Slice(0),
        "output.dense.weight_integer": Slice(1),
    }
    requires = {"attention.self.quant_mode": False}
