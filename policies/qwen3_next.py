from typing import ClassVar

from parallelformers_ng.policies.llama import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Experts, Heads, Part, Policy, Reduce, Row, Slice

KEY = Part("key", "head_k_dim")
VALUE = Part("query", "head_v_dim")
DELTA_NET = {
    "": Heads("num_v_heads", "num_k_heads", scaled=("value_dim",), scaled_key=("key_dim",)),
    "conv1d": Column(fused=(KEY, KEY, VALUE), widths=("conv_dim",)),
    "A_log": Slice(0),
    "dt_bias": Slice(0),
    "out_proj": Row(),
}


class Qwen3NextPolicy(Policy):
    """Llama's attention in every fourth layer, whose `q_proj` holds q and a gate for each head; a delta net in the
    others. Some layers have a plain MLP."""

    block: ClassVar[str | tuple[str, ...]] = "Qwen3NextDecoderLayer"
    plan = {**ATTENTION, **MLP}
    optional = ("self_attn", "mlp")


class Qwen3NextDeltaNetPolicy(Policy):
    """Gated delta rule (arXiv:2412.06464): several value heads share a key head, and the projections are interleaved by
    key heads."""

    block = "Qwen3NextGatedDeltaNet"
    plan = {
        **DELTA_NET,
        "in_proj_qkvz": Column(interleaved=(KEY, KEY, VALUE, VALUE)),
        "in_proj_ba": Column(interleaved=("query", "query")),
    }


class Qwen3NextMoEPolicy(Policy):
    """Routed experts and a gated one for all tokens, summed over the ranks together."""

    block: ClassVar[str | tuple[str, ...]] = "Qwen3NextSparseMoeBlock"
    plan = {
        "": Reduce(),
        "experts": Experts(reduce=False),
        "shared_expert.gate_proj": Column(),
        "shared_expert.up_proj": Column(),
        "shared_expert.down_proj": Row(reduce=False),
    }
