from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class DFineEncoderPolicy(Policy):
    """RT-DETR's encoder layer. `DFineMLPPolicy` cuts its MLP, which keeps layers in a list."""

    block = ("DFineEncoderLayer", "Deimv2EncoderLayer")
    plan = {**ATTENTION, "self_attn": Heads("config.num_attention_heads")}


class DFineDecoderPolicy(DFineEncoderPolicy):
    """RT-DETR's decoder layer with a gate instead of a residual. The gate splits its outputs in two halves, so each
    rank needs all outputs."""

    block = ("DFineDecoderLayer", "Deimv2DecoderLayer")
    plan = {**ATTENTION, "self_attn": Heads("config.decoder_attention_heads"), "gateway.gate": Column(gather=True)}
    optional = ("gateway",)


class DFineMLPPolicy(Policy):
    """An MLP of two layers in a block, or of three layers that predict the distributions of a box's edges."""

    block = ("DFineMLP", "Deimv2MLP")
    plan = {"layers.0": Column(), "layers.1": Row(), "layers.2": Column(gather=True)}
    optional = ("layers.2",)
