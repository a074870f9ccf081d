from parallelformers_ng.policies.nemotron import NemotronPolicy


class ArceePolicy(NemotronPolicy):
    """Llama's attention and an ungated MLP."""

    block = "ArceeDecoderLayer"
