from parallelformers_ng.policies.llama import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Heads, Part, Policy, Row, Slice

KEY = Part("key", "head_k_dim")
VALUE = Part("query", "head_v_dim")
DELTA_NET = {
    "": Heads("num_v_heads", "num_k_heads", scaled=("value_dim",), scaled_key=("key_dim",)),
    "conv1d": Column(fused=(KEY, KEY, VALUE), widths=("conv_dim",)),
    "{A_log,dt_bias}": Slice(0),
    "out_proj": Row(),
}


class Qwen3NextPolicy(Policy):
    """Llama's attention in every fourth layer, and a delta net in all other layers. `q_proj` packs q and a gate for
    each head. Some layers have a plain MLP, others the experts of `DeepseekV2MoEPolicy`."""

    block = ("Qwen3NextDecoderLayer", "Qwen3_5DecoderLayer", "Qwen3_5MoeDecoderLayer")
    plan = {**ATTENTION, **MLP}
    optional = ("self_attn", "mlp")


class Qwen3NextDeltaNetPolicy(Policy):
    """A delta net by the gated delta rule (arXiv:2412.06464). Several value heads share a key head, and projections are
    interleaved by key head."""

    block = "Qwen3NextGatedDeltaNet"
    plan = {
        **DELTA_NET,
        "in_proj_qkvz": Column(interleaved=(KEY, KEY, VALUE, VALUE)),
        "in_proj_ba": Column(interleaved=("query", "query")),
    }


class Qwen35DeltaNetPolicy(Policy):
    """Qwen3-Next's delta net with q, k and v packed side by side, and separate projections of gates."""

    block = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
    plan = {
        **DELTA_NET,
        "in_proj_qkv": Column(fused=(KEY, KEY, VALUE)),
        "in_proj_{z,b,a}": Column(),
    }
