from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Row


class NemotronPolicy(LlamaPolicy):
    """Llama's attention and an ungated MLP, whose activation may have weights."""

    block = ("NemotronDecoderLayer", "ApertusDecoderLayer", "ArceeDecoderLayer")
    plan = {**ATTENTION, "mlp.up_proj": Column(), "mlp.down_proj": Row()}
