from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.policy import Column, Experts, Heads, Policy, Reduce, Row


class Llama4Policy(Policy):
    """Llama's block; where it has no experts, it has an MLP of their shape."""

    block = "Llama4TextDecoderLayer"
    plan = {
        **ATTENTION,
        "feed_forward.gate_proj": Column(),
        "feed_forward.up_proj": Column(),
        "feed_forward.down_proj": Row(),
    }
    optional = ("feed_forward",)


class Llama4MoEPolicy(Policy):
    """Every expert sees all tokens, weighted; with the shared one they are summed over the ranks together."""

    block = "Llama4TextMoe"
    plan = {
        "": Reduce(),
        "experts": Experts(reduce=False),
        "shared_expert.gate_proj": Column(),
        "shared_expert.up_proj": Column(),
        "shared_expert.down_proj": Row(reduce=False),
    }


class Llama4VisionPolicy(Policy):
    """The layer of the vision tower."""

    block = "Llama4VisionEncoderLayer"
    plan = {
        "self_attn": Heads("num_heads"),
        "self_attn.q_proj": Column(),
        "self_attn.k_proj": Column(),
        "self_attn.v_proj": Column(),
        "self_attn.o_proj": Row(),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }


class Llama4AdapterPolicy(Policy):
    """Between the vision tower and the decoder."""

    block = ("Llama4VisionMLP2", "Llama4MultiModalProjector")
    plan = {"fc1": Column(), "fc2": Row(), "linear_1": Column(gather=True)}
    optional = ("fc1", "fc2", "linear_1")
