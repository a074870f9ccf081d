from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Experts, Row


class GraniteMoePolicy(LlamaPolicy):
    """Granite's attention with routed experts.

    Later models have an additional MLP through which all tokens go; it packs gate and up side by side. In the hybrid
    models, most layers have Mamba 2's mixer instead of attention, and some models have no routed experts.
    """

    block = ("GraniteMoeDecoderLayer", "GraniteMoeSharedDecoderLayer", "GraniteMoeHybridDecoderLayer")
    plan = {
        **ATTENTION,
        "block_sparse_moe.experts": Experts(),
        "shared_mlp.input_linear": Column(fused=2),
        "shared_mlp.output_linear": Row(),
    }
    optional = ("self_attn", "block_sparse_moe", "shared_mlp")
