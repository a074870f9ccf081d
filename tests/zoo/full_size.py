"""How a model type's real default configuration would be cut: planned on `meta`, without weights."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from parallelformers_ng import plan
from parallelformers_ng.checkpoint.model_class import empty_model
from parallelformers_ng.errors import ParallelError
from tests.zoo.catalogue import classes_of
from tests.zoo.overrides import configuration


@dataclass
class FullSize:
    """A model type's default configuration, planned.

    Attributes:
        model_type, model_class: type and class of the model.
        status: "planned", "refused" or "skipped" (transformers cannot build it here).
        reason: in words, unless planned.
        parameters: how many it has.
        bytes: bytes of the whole model.
        cut: number of ranks → share of all bytes that are cut, 0 to 1.
        fullest: number of ranks → bytes of the fullest rank, an even share being 1.
        seconds: number of ranks → processor time that the plan took; the first includes the search for rules.
        whole: the largest tensors that every rank holds whole at the most ranks: name → bytes.
    """

    model_type: str
    model_class: str = ""
    status: str = "planned"
    reason: str = ""
    parameters: int = 0
    bytes: int = 0
    cut: dict[int, float] = field(default_factory=dict)
    fullest: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)


def measure(model_type: str, world_sizes: tuple[int, ...]) -> dict[str, Any]:
    """The `FullSize` of one model type, as a dictionary."""
    found = FullSize(model_type)
    try:
        model = build(model_type)
    except Exception as error:  # what cannot be built is no matter of cutting it
        found.status, found.reason = "skipped", _in_short(error)
        return asdict(found)
    found.model_class = type(model).__name__
    found.parameters = sum(parameter.numel() for parameter in model.parameters())
    for size in world_sizes:
        start = time.process_time()
        try:
            made = plan(model, size)
        except ParallelError as error:
            found.reason = _in_short(error)
            found.status = "skipped" if "No module named" in found.reason else "refused"  # needs a further package
            return asdict(found)
        found.seconds[size] = round(time.process_time() - start, 1)
        found.bytes = made.bytes_whole
        found.cut[size] = round(1 - made.whole_share, 4)
        found.fullest[size] = round(max(made.bytes_per_rank) * size / max(1, made.bytes_whole), 3)
        found.whole = dict(list(made.replicated.items())[:3])
    return asdict(found)


def build(model_type: str) -> PreTrainedModel:
    """Return the model of a type's default configuration on `meta`, with the settings that it needs."""
    try:
        return empty_model(model_type)
    except Exception as error:  # any modelling code may run here
        refusal = error
    for name in classes_of(model_type):
        try:
            with torch.device("meta"):
                return (
                    getattr(transformers, name)
                    ._from_config(configuration(model_type, CONFIG_MAPPING_NAMES[model_type]))
                    .eval()
                )
        except Exception:  # the next class may be buildable; if none is, the first refusal says why
            continue
    raise refusal


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
