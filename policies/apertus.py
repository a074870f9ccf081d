from parallelformers_ng.policies.nemotron import NemotronPolicy


class ApertusPolicy(NemotronPolicy):
    """Llama's attention with a norm per head on q and k, and an ungated MLP whose activation has weights."""

    block = "ApertusDecoderLayer"
