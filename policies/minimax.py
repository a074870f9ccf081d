from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.policies.olmoe import OlmoePolicy
from parallelformers_ng.sharding.rules import Column, Experts, Heads, Norm, Policy, Row, Slice, moved


class MiniMaxLightningPolicy(Policy):
    """Linear attention: `qkv_proj` is interleaved per head, and every head has decays of its own."""

    block = "MiniMaxLightningAttention"
    plan = {
        "": Heads("num_attention_heads"),
        "qkv_proj": Column(),
        "output_gate": Column(),
        "slope_rate": Slice(0),
        "query_decay": Slice(0),
        "key_decay": Slice(0),
        "diagonal_decay": Slice(1),
        "norm": Norm(),
        "out_proj": Row(),
    }


class MiniMaxAttentionPolicy(Policy):
    """Llama's attention, in every other layer."""

    block = "MiniMaxAttention"
    plan = moved(ATTENTION, "self_attn", "")


class MiniMaxPolicy(Policy):
    """Routed experts behind either attention."""

    block = "MiniMaxDecoderLayer"
    plan = {"mlp.experts": Experts()}


class MiniMaxM2Policy(OlmoePolicy):
    """OLMoE's block."""

    block = "MiniMaxM2DecoderLayer"
