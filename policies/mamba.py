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
        "A_log": Slice(0),
        "D": Slice(0),
        "out_proj": Row(),
    }


INNER = Part("query", "head_dim")
STATE = Part("key", "ssm_state_size")
TIME_STEP = Part("query", 1)


class Mamba2Policy(Policy):
    """A state-space mixer with heads. Heads of a group share B and C, as query heads share a key/value head.

    `in_proj` packs gate, x, B, C and time step. The gated norm is over the channels of a group, or over all channels.
    """

    block = (
        "Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "Zamba2MambaMixer",
    )  # fmt: skip
    plan = {
        "": Heads("num_heads", "n_groups", scaled=("intermediate_size",)),
        "in_proj": Column(fused=(INNER, INNER, STATE, STATE, TIME_STEP)),
        "conv1d": Column(fused=(INNER, STATE, STATE), widths=("conv_dim",)),
        "A_log": Slice(0),
        "D": Slice(0),
        "dt_bias": Slice(0),
        "norm": Norm(),
        "out_proj": Row(),
    }


class BambaPolicy(LlamaPolicy):
    """Llama's block; most layers have Mamba 2's mixer instead of attention."""

    block = "BambaDecoderLayer"
    plan = moved(LlamaPolicy.plan, "mlp", "feed_forward")
    optional = ("self_attn",)


class FalconH1MixerPolicy(Policy):
    """Mamba 2's mixer with a multiplier for each part of `in_proj`. Most configurations have no norm."""

    block = "FalconH1Mixer"
    plan = {**Mamba2Policy.plan, "mup_vector": Slice(2, fused=(INNER, INNER, STATE, STATE, TIME_STEP))}
    optional = ("norm",)


class FalconH1Policy(LlamaPolicy):
    """Llama's block with a mixer beside the attention; mixer and attention read the output of the same norm."""

    block = "FalconH1DecoderLayer"
    plan = moved(LlamaPolicy.plan, "mlp", "feed_forward")


class JambaPolicy(LlamaPolicy):
    """Layers of attention or Mamba, each with an MLP or experts. `MambaPolicy` cuts the mixer."""

    block = ("JambaAttentionDecoderLayer", "JambaMambaDecoderLayer")
    plan = {**moved(LlamaPolicy.plan, "mlp", "feed_forward"), "feed_forward.experts": Experts()}
    optional = ("self_attn", "feed_forward")
