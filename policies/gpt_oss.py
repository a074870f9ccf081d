from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy
from parallelformers_ng.sharding.rules import Experts, Slice


class GptOssPolicy(LlamaPolicy):
    """Llama's attention with biases and a sink per query head. The experts' gate and up are interleaved."""

    block = "GptOssDecoderLayer"
    plan = {**ATTENTION, "self_attn.sinks": Slice(0), "mlp.experts": Experts()}
