from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Experts, Policy, Row


class NemotronPolicy(LlamaPolicy):
    """Llama's attention and an ungated MLP, whose activation may have weights. Starcoder 2 gives the MLP's layers the
    names of GPT-2."""

    block = ("NemotronDecoderLayer", "ApertusDecoderLayer", "ArceeDecoderLayer", "Starcoder2DecoderLayer")
    plan = {**ATTENTION, "mlp.{up_proj,c_fc}": Column(), "mlp.{down_proj,c_proj}": Row()}
    optional = ("mlp",)


class NemotronHMLPPolicy(Policy):
    """The ungated MLP: a separate layer, or the experts that all tokens share."""

    block = "NemotronHMLP"
    plan = {"up_proj": Column(), "down_proj": Row()}


class NemotronHMoEPolicy(Policy):
    """Ungated routed experts. The narrow layers before and after the experts stay whole."""

    block = "NemotronHMoE"
    plan = {"experts": Experts()}
