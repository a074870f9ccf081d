from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Experts, Heads, Norm, Part, Policy, Row, Slice, moved


class MambaPolicy(Policy):
    """A selective state-space mixer: every channel has its own recurrence.

    `x_proj` computes time step, B and C from all channels, so its outputs are summed over the ranks.
    """

    block = ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer")
    plan = {
        "": Heads("intermediate_size"),
        "in_proj": Column(fused=2),
        "conv1d": Column(),
        "x_proj": Row(),
        "dt_proj": Column(),
        "{A_log,D}": Slice(0),
        "out_proj": Row(),
    }


INNER = Part("query", "head_dim")
STATE = Part("key", "ssm_state_size")
TIME_STEP = Part("query", 1)


class Mamba2Policy(Policy):
    """A state-space mixer with heads. Heads of a group share B and C, as query heads share a key/value head.

    `in_proj` packs gate, x, B, C and time step; Falcon-H1 has a multiplier for each of these parts (`mup_vector`). The
    gated norm is over the channels of a group, or over all channels. Most configurations of Falcon-H1 have no norm.
    """

    block = (
        "Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer",
        "Zamba2MambaMixer",
    )  # fmt: skip
    plan = {
        "": Heads("num_heads", "n_groups", scaled=("intermediate_size",)),
        "in_proj": Column(fused=(INNER, INNER, STATE, STATE, TIME_STEP)),
        "conv1d": Column(fused=(INNER, STATE, STATE), widths=("conv_dim",)),
        "{A_log,D,dt_bias}": Slice(0),
        "mup_vector": Slice(2, fused=(INNER, INNER, STATE, STATE, TIME_STEP)),
        "norm": Norm(),
        "out_proj": Row(),
    }
    optional = ("mup_vector", "norm")


class MambaLayerPolicy(LlamaPolicy):
    """Llama's block, in which a mixer replaces the attention of most layers (Bamba, Jamba), or is beside the attention
    (Falcon-H1). Jamba's layers have an MLP or experts. `MambaPolicy` and `Mamba2Policy` cut the mixers."""

    block = (
        "BambaDecoderLayer", "FalconH1DecoderLayer", "JambaAttentionDecoderLayer", "JambaMambaDecoderLayer",
    )  # fmt: skip
    plan = {**moved(LlamaPolicy.plan, "mlp", "feed_forward"), "feed_forward.experts": Experts()}
    optional = ("self_attn", "feed_forward")
