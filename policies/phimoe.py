from parallelformers_ng.policies.mixtral import MixtralPolicy


class PhimoePolicy(MixtralPolicy):
    """Mixtral's block with biases and plain layer norms."""

    block = "PhimoeDecoderLayer"
