from parallelformers_ng.policies.dinov3 import ATTENTION
from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Column, Policy, Row, moved


class PixtralPolicy(Policy):
    """The layer of Mistral's vision tower, with DINOv3's attention and Llama's MLP."""

    block = "PixtralAttentionLayer"
    plan = {**ATTENTION, **moved(MLP, "mlp", "feed_forward")}


class Mistral3ProjectorPolicy(Policy):
    """The layers between the vision tower and the decoder: a merger of patches, then an MLP."""

    block = "Mistral3MultiModalProjector"
    plan = {"patch_merger.merging_layer": Column(gather=True), "linear_1": Column(), "linear_2": Row()}
