from parallelformers_ng.policies.deepseek_v2 import DeepseekV2MoEPolicy
from parallelformers_ng.policies.llama import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Heads, Part, Policy, Row, Slice, moved

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
    """Llama's attention in every fourth layer, and a delta net in all other layers. `q_proj` packs q and a gate for
    each head. Some layers have a plain MLP."""

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
        "in_proj_z": Column(),
        "in_proj_b": Column(),
        "in_proj_a": Column(),
    }


class Qwen3NextMoEPolicy(Policy):
    """Routed experts, and a shared expert that may be gated; the ranks sum the outputs of all experts in one
    all-reduce."""

    block = ("Qwen3NextSparseMoeBlock", "Llama4TextMoe", "Qwen3_5MoeSparseMoeBlock")
    plan = moved(DeepseekV2MoEPolicy.plan, "shared_experts", "shared_expert")
