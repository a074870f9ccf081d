"""Checks on a tiny random twin whether a model can be divided into stages: outputs and tokens must match."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.live_edits import LiveEdits
from parallelformers_ng.autopolicy.proof import attention_of, identity
from parallelformers_ng.autopolicy.trials import Trials
from parallelformers_ng.autopolicy.twin import Twin
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.pipeline import in_stages
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy import Selection

# Selection without policies, for stages of one rank, which hold whole layers.
UNCUT = Selection((), "pipeline", vocabulary=False, leftovers=False)
# Layers of a twin. Two layers in each of two stages test the step within a stage and the step between stages.
_LAYERS = 4
_PROVEN: dict[tuple[Any, ...], bool | str] = {}


def may_merge(model: PreTrainedModel) -> bool:
    """Return whether a stage need send only the result of its last block to the other ranks, not of every block.

    The proof divides a twin into two stages. The process keeps the result for models with an equal `identity`.
    """
    key = identity(model)
    if key not in _PROVEN:
        _PROVEN[key] = _prove(model)
    proven = _PROVEN[key]
    if isinstance(proven, str):
        raise UnsupportedModelError(f"{type(model).__name__} cannot be computed in stages: {proven}")
    return proven


def _prove(model: PreTrainedModel) -> bool | str:
    try:
        with torch.inference_mode(False), torch.enable_grad():  # the caller may have switched gradients off
            twin = make_twin(type(model), model.config, attention_of(model), layers=_LAYERS, edits=LiveEdits(model))
    except UnsupportedModelError as error:
        return str(error)
    if not twin.runs_whole:
        return f"a tiny twin runs on none of the known inputs: {twin.unreached[:300]}"
    for merged in (True, False):
        failure = _StageTrials(twin, merged).objection()
        if not failure:
            return merged
    return f"a tiny random copy of the model has other outputs in two stages than whole ({failure})"


class _StageTrials(Trials):
    """Trials of a twin that is divided into two stages of one rank each."""

    def __init__(self, twin: Twin, merged: bool) -> None:
        super().__init__(twin, UNCUT, world_size=2)
        self._merged = merged

    def plan(self, *choices: Any, **leftovers: Any) -> ShardPlan:
        return in_stages(build_plan(self.twin.model, 1, UNCUT), self.twin.model, [0.5, 0.5], self._merged)
