"""Model → policies: the caller's, then the written ones, then inferred and proven ones for the rest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.live_code.stock import foreign_modules
from parallelformers_ng.sharding.policy import Selection
from parallelformers_ng.sharding.policy_registry import is_covered, known_policies, repeated_blocks
from parallelformers_ng.sharding.rules import Policy


def select(
    model: nn.Module,
    custom: type[Policy] | Sequence[type[Policy]] | None = None,
    world_size: int | None = None,
    parts: Sequence[float] = (),
) -> Selection:
    """Find the policies for a model: the caller's first, then written ones for the remaining blocks. For blocks of a
    transformers model that still remain, infer policies, and accept them after a twin proof.

    Args:
        model: the model, on any device.
        custom: the caller's policies.
        world_size: number of ranks that a proof is made for; None looks at the written policies alone.
        parts: fraction of the model for each rank, as for `build_plan`.

    Raises:
        PolicyError: `custom` is not a Policy class or a list of them, says what no rule can mean, or names a block that
            the model lacks.
        UnsupportedModelError: no policy fits.
    """
    selection, misfits = known_policies(model, custom, world_size)
    if selection.policies and not misfits and (world_size is None or is_covered(model, selection.policies)):
        if world_size in (None, 1) or not isinstance(model, PreTrainedModel) or not foreign_modules(model):
            return selection
        from parallelformers_ng.autopolicy.proof import prove_live_code  # slow to import

        return prove_live_code(model, selection, world_size or 1, parts)
    beside = "".join(f"; {misfit}" for misfit in misfits)
    if world_size is None or not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"no policy knows {type(model).__name__}: none of its repeated blocks"
            f" ({', '.join(repeated_blocks(model)) or 'none found'}) has one in parallelformers_ng.policies{beside}."
            " Write one (POLICY.md shows how, about ten lines) and pass it as custom_policies="
        )
    from parallelformers_ng.autopolicy.proof import prove  # slow to import, and only models without policies need it

    try:
        return prove(model, selection, world_size, tuple(parts)).selection
    except UnsupportedModelError as error:
        if type(model).forward is nn.Module.forward:  # it has methods alone, which nobody knows how to call
            return Selection((), "held in parts", vocabulary=False)
        raise UnsupportedModelError(f"{error}{beside}") from error
