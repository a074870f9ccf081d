"""Selects the policies for a model: custom policies first, then written policies, then inferred and proven policies."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.proof import prove, prove_live_code
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.live_code.stock import foreign_modules
from parallelformers_ng.sharding.policy import CustomPolicies, Selection
from parallelformers_ng.sharding.policy_registry import is_covered, known_policies, repeated_blocks


def select(
    model: nn.Module, custom: CustomPolicies = None, world_size: int | None = None, parts: Sequence[float] = ()
) -> Selection:
    """Select the policies for a model.

    Custom policies come first, then written policies for blocks without a custom policy. For the remaining blocks of a
    transformers model, policies are inferred and then proven on a twin.
    """
    selection, misfits = known_policies(model, custom, world_size)
    if selection.policies and not misfits and (world_size is None or is_covered(model, selection.policies)):
        if world_size in (None, 1) or not isinstance(model, PreTrainedModel) or not foreign_modules(model):
            return selection
        return prove_live_code(model, selection, world_size or 1, parts)
    reasons = "".join(f"; {misfit}" for misfit in misfits)
    if world_size is None or not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"no policy knows {type(model).__name__}: none of its repeated blocks"
            f" ({', '.join(repeated_blocks(model)) or 'none found'}) has one in parallelformers_ng.policies{reasons}."
            " Write one (POLICY.md shows how, about ten lines) and pass it as custom_policies="
        )
    try:
        return prove(model, selection, world_size, tuple(parts)).selection
    except UnsupportedModelError as error:
        if type(model).forward is nn.Module.forward:  # without a forward, a twin cannot be run
            return Selection((), "leftovers", vocabulary=False)
        raise UnsupportedModelError(f"{error}{reasons}") from error
