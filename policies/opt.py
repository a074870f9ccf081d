from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.sharding.rules import Column, Policy, Row


class OPTPolicy(Policy):
    """The forward views q as `(batch, -1, num_heads, head_dim)`: a whole count lets `-1` swallow the sequence."""

    block = "OPTDecoderLayer"
    plan = {**ATTENTION, "fc1": Column(), "fc2": Row()}


class OPTProjectionPolicy(Policy):
    """The projections of OPT-350m between the width of the embeddings and that of the blocks."""

    block = "OPTDecoder"
    plan = {"project_in": Column(gather=True), "project_out": Column(gather=True)}
    optional = ("project_in", "project_out")
