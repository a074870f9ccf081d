from typing import ClassVar

from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Experts, Row


class GraniteMoePolicy(LlamaPolicy):
    """Granite's attention with routed experts."""

    block = "GraniteMoeDecoderLayer"
    plan = {**ATTENTION, "block_sparse_moe.experts": Experts()}


class GraniteMoeSharedPolicy(GraniteMoePolicy):
    """GraniteMoe's block with an additional MLP through which all tokens go; it packs gate and up side by side."""

    block = "GraniteMoeSharedDecoderLayer"
    plan = {**GraniteMoePolicy.plan, "shared_mlp.input_linear": Column(fused=2), "shared_mlp.output_linear": Row()}
    optional: ClassVar[tuple[str, ...]] = ("shared_mlp",)


class GraniteMoeHybridPolicy(GraniteMoeSharedPolicy):
    """GraniteMoeShared's block with Mamba 2's mixer instead of attention in most layers. Some models have no routed
    experts."""

    block = "GraniteMoeHybridDecoderLayer"
    optional = ("self_attn", "block_sparse_moe")
