from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.policy import Column, Heads, Policy, Row


class MllamaPolicy(Policy):
    """Llama 3.2 with images: Llama's block, and blocks with attention to the image in place of that to the text."""

    block = ("MllamaSelfAttentionDecoderLayer", "MllamaCrossAttentionDecoderLayer")
    plan = {
        **LlamaPolicy.plan,
        "self_attn": Heads("num_heads", "num_key_value_heads", groups="num_key_value_groups"),
        **{
            path.replace("self_attn", "cross_attn"): rule
            for path, rule in LlamaPolicy.plan.items()
            if path.startswith("self_attn.")
        },
        "cross_attn": Heads("num_heads", "num_key_value_heads", groups="num_key_value_groups"),
    }
    optional = ("self_attn", "cross_attn")


class MllamaVisionPolicy(Policy):
    """The layer of the vision tower, on the tiles alone and on all of them."""

    block = "MllamaVisionEncoderLayer"
    plan = {
        "self_attn": Heads("num_heads"),
        "self_attn.q_proj": Column(),
        "self_attn.k_proj": Column(),
        "self_attn.v_proj": Column(),
        "self_attn.o_proj": Row(),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }


class MllamaProjectorPolicy(Policy):
    """Between the tower and the decoder."""

    block = "MllamaModel"
    plan = {"multi_modal_projector": Column(gather=True)}
