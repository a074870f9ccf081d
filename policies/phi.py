from parallelformers_ng.policies.llama import HEADS
from parallelformers_ng.sharding.rules import Column, Policy, Row


class PhiPolicy(Policy):
    """Llama's attention with a biased output layer `dense`, beside an ungated MLP. All heads share the norm of q and
    the norm of k."""

    block = "PhiDecoderLayer"
    plan = {**HEADS, "self_attn.dense": Row(), "mlp.fc1": Column(), "mlp.fc2": Row()}
