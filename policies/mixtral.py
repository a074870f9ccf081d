from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.policy import Experts


class MixtralPolicy(LlamaPolicy):
    """Llama's attention; every expert is cut by width and the router stays whole."""

    block = "MixtralDecoderLayer"
    plan = {
        **{path: rule for path, rule in LlamaPolicy.plan.items() if path.startswith("self_attn")},
        "mlp.experts": Experts(),
    }
