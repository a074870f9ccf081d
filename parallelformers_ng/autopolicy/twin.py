"""A twin: a tiny random copy of a model's architecture, with inputs for it and its outputs for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.sharding.own_heads import gathered
from parallelformers_ng.sharding.structure import tensors


@dataclass
class TwinProbe:
    """A part of a twin that runs by itself, with inputs and the outputs of the whole twin for them.

    Attributes:
        path: dotted path of the part, "" for the whole model.
        inputs: keyword arguments of its forward.
        expected: the tensors of its output.
    """

    path: str
    inputs: dict[str, Any]
    expected: list[torch.Tensor]


@dataclass
class Twin:
    """A tiny model, and what its forward shows of it.

    Attributes:
        model: the model, whole, every parameter random, in float64 where its code allows, else in float32.
        probes: the parts to run and compare.
        calls: module name → order of its first call.
        gradients: parameter name → absolute gradient of the outputs, for parameters that influence them.
        unreached: why the probes do not reach some parts, or "".
        single_layers: paths of layers that only a probe of their own reaches.
    """

    model: PreTrainedModel
    probes: list[TwinProbe]
    calls: dict[str, int]
    gradients: dict[str, torch.Tensor]
    unreached: str = ""
    single_layers: list[str] = field(default_factory=list)

    @property
    def runs_whole(self) -> bool:
        """Whether there is a probe of the whole model."""
        return bool(self.probes) and not self.probes[0].path

    @property
    def tolerance(self) -> float:
        """Largest difference that is rounding, relative to the largest value."""
        return 1e-6 if next(self.model.parameters()).dtype == torch.float64 else 1e-4


def run(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return the output's tensors; the inputs are copied first, as some forwards write to them."""
    arguments = {
        name: (value.to(dtype) if dtype and value.is_floating_point() else value.clone())
        if isinstance(value, torch.Tensor)
        else copy.copy(value)
        for name, value in inputs.items()
    }
    return [gathered(tensor) for tensor in tensors(model(**arguments))]


def sharing_copy(model: Any) -> Any:
    """Return a copy that shares the model's parameters. State that a forward keeps, such as the offsets between
    positions and tokens of multimodal models, stays in the copy."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def length_options(model: Any, tokens: int) -> dict[str, int]:
    """Keyword arguments of `generate` for so many tokens, also for a decoder whose configuration names no start."""
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        options["decoder_start_token_id"] = 0
    return options


def equal(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> bool:
    """Return whether two runs have the same outputs, up to rounding."""
    return len(got) == len(wanted) and all(difference(g, w) <= tolerance for g, w in zip(got, wanted, strict=True))


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest absolute difference relative to the largest absolute value; infinite where the shapes differ."""
    if got.shape != wanted.shape:
        return float("inf")
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(got, wanted) else float("inf")
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    gap = torch.where(same, torch.zeros_like(wanted), (got - wanted).abs())
    if not gap.numel():
        return 0.0
    scale = wanted[wanted.isfinite()].abs().amax() if wanted.isfinite().any() else torch.ones(())
    top = float(gap.amax())
    return float("inf") if top != top else top / max(float(scale), 1e-12)
