from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy
from parallelformers_ng.sharding.rules import Experts


class MixtralPolicy(LlamaPolicy):
    """Llama's attention and routed experts. Every expert is cut by width; the router stays whole."""

    block = ("MixtralDecoderLayer", "PhimoeDecoderLayer")
    plan = {**ATTENTION, "mlp.experts": Experts()}
