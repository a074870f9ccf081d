from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Row


class NemotronPolicy(LlamaPolicy):
    """Llama's attention with partial rotary positions, and an ungated MLP."""

    block = "NemotronDecoderLayer"
    plan = {**ATTENTION, "mlp.up_proj": Column(), "mlp.down_proj": Row()}
