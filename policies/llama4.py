from parallelformers_ng.policies.llama import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved


class Llama4Policy(Policy):
    """Llama's block. In layers without experts, `feed_forward` is an MLP like Llama's."""

    block = "Llama4TextDecoderLayer"
    plan = {**ATTENTION, **moved(MLP, "mlp", "feed_forward")}
    optional = ("feed_forward",)


class Llama4VisionPolicy(Policy):
    """The layer of the vision tower, with equal numbers of query heads and key/value heads."""

    block = ("Llama4VisionEncoderLayer", "MllamaVisionEncoderLayer")
    plan = {**ATTENTION, "self_attn": Heads("num_heads"), "mlp.fc1": Column(), "mlp.fc2": Row()}


class Llama4AdapterPolicy(Policy):
    """The layers between the vision tower and the decoder."""

    block = ("Llama4VisionMLP2", "Llama4MultiModalProjector")
    plan = {"fc1": Column(), "fc2": Row(), "linear_1": Column(gather=True)}
    optional = ("fc1", "fc2", "linear_1")
