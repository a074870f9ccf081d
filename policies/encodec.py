from parallelformers_ng.sharding.rules import Policy, Stored


class EncodecPolicy(Policy):
    """The codebooks, which the forward searches for the nearest entry. The codec's convolutions and recurrent layers
    stay whole: they are small beside the models that use the codec."""

    block = "EncodecEuclideanCodebook"
    plan = {"": Stored(("embed", "embed_avg"))}
