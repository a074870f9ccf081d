from parallelformers_ng.sharding.rules import Policy, Stored


class EncodecPolicy(Policy):
    """The codebooks, which are searched for the nearest entry. Convolutions and the recurrent layers between them are
    small beside the models that use this codec."""

    block = "EncodecEuclideanCodebook"
    plan = {"": Stored(("embed", "embed_avg"))}
