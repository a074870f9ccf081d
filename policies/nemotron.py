from parallelformers_ng.policies.gpt2 import MLP
from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Experts, Policy, Row


class NemotronPolicy(LlamaPolicy):
    """Llama's attention and an ungated MLP, whose activation may have weights."""

    block = ("NemotronDecoderLayer", "ApertusDecoderLayer", "ArceeDecoderLayer")
    plan = {**ATTENTION, "mlp.up_proj": Column(), "mlp.down_proj": Row()}


class Starcoder2Policy(LlamaPolicy):
    """Llama's attention with biases, and an ungated MLP."""

    block = "Starcoder2DecoderLayer"
    plan = {**ATTENTION, **MLP}


class NemotronHMLPPolicy(Policy):
    """The ungated MLP: a separate layer, or the experts that all tokens share."""

    block = "NemotronHMLP"
    plan = {"up_proj": Column(), "down_proj": Row()}


class NemotronHMoEPolicy(Policy):
    """Ungated routed experts. The narrow layers before and after the experts stay whole."""

    block = "NemotronHMoE"
    plan = {"experts": Experts()}
