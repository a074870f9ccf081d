from parallelformers_ng.policies.llama import HEADS
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class PhiPolicy(Policy):
    """Llama's attention with a biased output layer `dense`, beside an ungated MLP. All heads share the norm of q and
    the norm of k."""

    block = "PhiDecoderLayer"
    plan = {**HEADS, "self_attn.dense": Row(), "mlp.fc1": Column(), "mlp.fc2": Row()}


class Phi3Policy(Policy):
    """Llama's block with q, k and v packed in one projection, and gate and up in another. The forward slices q, k and v
    by counts in the configuration."""

    block = "Phi3DecoderLayer"
    plan = {
        "self_attn": Heads(
            "config.num_attention_heads",
            "num_key_value_heads",
            groups="num_key_value_groups",
            scaled=("config.num_attention_heads",),
        ),
        "self_attn.qkv_proj": Column(fused=("query", "key", "key")),
        "self_attn.o_proj": Row(),
        "mlp.gate_up_proj": Column(fused=2),
        "mlp.down_proj": Row(),
    }
