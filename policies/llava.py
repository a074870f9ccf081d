from parallelformers_ng.sharding.rules import Column, Policy, Row


class LlavaPolicy(Policy):
    """The MLP between a vision tower and a decoder. The vision tower and the decoder have their own policies."""

    block = (
        "LlavaMultiModalProjector", "LlavaNextMultiModalProjector", "LlavaNextVideoMultiModalProjector",
        "LlavaOnevisionMultiModalProjector", "VipLlavaMultiModalProjector", "VideoLlavaMultiModalProjector",
        "InternVLMultiModalProjector",
    )  # fmt: skip
    plan = {"linear_1": Column(), "linear_2": Row()}
