"""Plans model types' real default configurations, on `meta`, without weights."""

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
    """The plan of a model type's default configuration.

    Attributes:
        model_type, model_class: names of the type and of the class.
        status: "planned", "refused" or "skipped" (transformers cannot build it here).
        reason: explanation, unless planned.
        parameters: number of parameters.
        bytes: size of the whole model.
        cut: number of ranks → share of all bytes that are cut, 0 to 1.
        fullest: number of ranks → bytes of the fullest rank, relative to an even share.
        seconds: number of ranks → processor time of the plan; the first includes the search for rules.
        whole: largest replicated tensors at the highest number of ranks: name → bytes.
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
    """Return the `FullSize` of one model type, as a dictionary."""
    size_report = FullSize(model_type)
    try:
        model = build(model_type)
    except Exception as error:  # failures to build say nothing about cuts
        size_report.status, size_report.reason = "skipped", _in_short(error)
        return asdict(size_report)
    size_report.model_class = type(model).__name__
    size_report.parameters = sum(parameter.numel() for parameter in model.parameters())
    for size in world_sizes:
        start = time.process_time()
        try:
            shard_plan = plan(model, size)
        except ParallelError as error:
            size_report.reason = _in_short(error)
            size_report.status = (
                "skipped" if "No module named" in size_report.reason else "refused"
            )  # it needs another package
            return asdict(size_report)
        size_report.seconds[size] = round(time.process_time() - start, 1)
        size_report.bytes = shard_plan.bytes_whole
        size_report.cut[size] = round(1 - shard_plan.whole_share, 4)
        size_report.fullest[size] = round(max(shard_plan.bytes_per_rank) * size / max(1, shard_plan.bytes_whole), 3)
        size_report.whole = dict(list(shard_plan.replicated.items())[:3])
    return asdict(size_report)


def build(model_type: str) -> PreTrainedModel:
    """Return the model of a type's default configuration on `meta`. If transformers cannot build that model, the
    configuration gets the necessary settings."""
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
        except Exception:  # the next class may be buildable; otherwise the first refusal is raised
            continue
    raise refusal


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
