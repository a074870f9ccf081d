from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Experts, moved


class JambaPolicy(LlamaPolicy):
    """Layers of attention or Mamba, each with an MLP or experts. `MambaPolicy` cuts the mixer."""

    block = ("JambaAttentionDecoderLayer", "JambaMambaDecoderLayer")
    plan = {**moved(LlamaPolicy.plan, "mlp", "feed_forward"), "feed_forward.experts": Experts()}
    optional = ("self_attn", "feed_forward")
