from typing import ClassVar

from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class DFineEncoderPolicy(Policy):
    """RT-DETR's layer with an MLP that keeps its layers in a list, cut by its own policy."""

    block: ClassVar[str | tuple[str, ...]] = ("DFineEncoderLayer", "Deimv2EncoderLayer")
    plan = {**ATTENTION, "self_attn": Heads("config.num_attention_heads")}


class DFineDecoderPolicy(DFineEncoderPolicy):
    """The decoder's layer. A gate takes the residual's place; it halves its outputs, so it needs all of them."""

    block = ("DFineDecoderLayer", "Deimv2DecoderLayer")
    plan = {
        **ATTENTION,
        "self_attn": Heads("config.decoder_attention_heads"),
        "gateway.gate": Column(gather=True),
    }
    optional = ("gateway",)


class DFineDeformablePolicy(Policy):
    """Deformable attention without projections of values and outputs: heads are slices of the hidden state itself, so
    only where they look is computed in parts."""

    block = ("DFineMultiscaleDeformableAttention", "Deimv2MultiscaleDeformableAttention")
    plan = {"sampling_offsets": Column(gather=True), "attention_weights": Column(gather=True)}


class DFineMLPPolicy(Policy):
    """Two layers in a block, or three that end in the distributions of a box's corners."""

    block = ("DFineMLP", "Deimv2MLP")
    plan = {"layers.0": Column(), "layers.1": Row(), "layers.2": Column(gather=True)}
    optional = ("layers.2",)


class DFineGatedMLPPolicy(Policy):
    """DEIMv2's feed-forward."""

    block = "Deimv2SwiGLUFFN"
    plan = {"gate_proj": Column(), "up_proj": Column(), "down_proj": Row()}
