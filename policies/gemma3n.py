from parallelformers_ng.policies.llama import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, GaussianTopK, Policy


class Gemma3nPolicy(Policy):
    """Llama's attention, whose later layers read the keys and values of an earlier one, and an MLP that in the first
    layers drops most of its columns. The inputs of each layer's own, and the low-rank residual, stay narrow."""

    block = "Gemma3nTextDecoderLayer"
    plan = {
        **ATTENTION,
        **MLP,
        "mlp": GaussianTopK(),
        "per_layer_input_gate": Column(gather=True),
        "per_layer_projection": Column(gather=True),
    }


class Gemma3nInputsPolicy(Policy):
    """The embeddings that each layer has of its own, and the projections between the parallel hidden states."""

    block = "Gemma3nTextModel"
    plan = {
        "embed_tokens_per_layer": Column(gather=True),
        "per_layer_model_projection": Column(gather=True),
        "altup_projections.*": Column(gather=True),
        "altup_unembed_projections.*": Column(gather=True),
    }
