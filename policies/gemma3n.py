from parallelformers_ng.policies.llama import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, GaussianTopK, Policy


class Gemma3nPolicy(Policy):
    """A layer with Llama's attention and an MLP. Later layers read keys and values of an earlier layer, and the first
    layers' MLPs drop most columns. Narrow layers for per-layer inputs and the low-rank residual stay whole."""

    block = "Gemma3nTextDecoderLayer"
    plan = {
        **ATTENTION,
        **MLP,
        "mlp": GaussianTopK(),
        "per_layer_input_gate": Column(gather=True),
        "per_layer_projection": Column(gather=True),
    }
