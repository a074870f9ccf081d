"""Defines the twin: a tiny random copy of a model's architecture, with inputs and its outputs for these inputs."""

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
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler


@dataclass
class TwinProbe:
    """One test of a twin: inputs for the twin, or for a module in it, and the outputs of the unsharded module."""

    path: str  # dotted path of the part; "" for the whole model
    inputs: dict[str, Any]  # keyword arguments of the part's forward
    expected: list[torch.Tensor]  # tensors of the part's output

    def run_in(self, model: nn.Module, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        return run(model.get_submodule(self.path), self.inputs, dtype)


@dataclass
class Twin:
    """A tiny random copy of a model's architecture, and what was observed when it ran."""

    # the unsharded model with random parameters, in float64 if its code allows float64, otherwise in float32
    model: PreTrainedModel
    probes: list[TwinProbe]  # tests: inputs, and the outputs that sharded modules must return
    # name of a module → position of the end of its first call; a module comes after its submodules
    calls: dict[str, int]
    # name of a parameter that influences outputs → absolute gradient of the outputs, with the parameter's shape
    gradients: dict[str, torch.Tensor]
    unreached: str = ""  # why some modules could not be run on any inputs, as text; "" if all modules ran
    # paths of layers that no forward of the twin calls, so that each is tested alone
    single_layers: list[str] = field(default_factory=list)

    @property
    def runs_whole(self) -> bool:
        """Whether the first test (probe) runs the whole model, not only a part."""
        return bool(self.probes) and not self.probes[0].path

    @property
    def tolerance(self) -> float:
        """Largest difference that counts as rounding, relative to the largest value."""
        return 1e-6 if next(self.model.parameters()).dtype == torch.float64 else 1e-4


def failure_of(error: Exception) -> str:
    """Return the class of an error of modelling code, and at most 200 characters of the first line of its message.

    An exception of a signal handler of the program is raised again.
    """
    raise_if_of_handler(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def run(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Run a model on copies of the inputs, because some forwards change their inputs. Return the output's tensors.

    If `dtype` is set, floating-point inputs are cast to it. KV caches are left out of the result. Attention weights are
    gathered from all ranks, so all ranks must call this function together.
    """
    arguments = {
        name: (value.to(dtype) if dtype and value.is_floating_point() else value.clone())
        if isinstance(value, torch.Tensor)
        else copy.copy(value)
        for name, value in inputs.items()
    }
    return [gathered(tensor) for tensor in tensors(model(**arguments))]


def sharing_copy(model: Any) -> Any:
    """Return a copy of a model that shares the model's parameters, but not its buffers.

    A forward of the copy may store state, such as position offsets of multimodal models, without changing the original.
    """
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def length_options(model: Any, tokens: int) -> dict[str, int]:
    """Return keyword arguments of `generate` for exactly `tokens` new tokens.

    A decoder whose configuration names no start token starts with token 0.
    """
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        options["decoder_start_token_id"] = 0
    return options


def equal(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> bool:
    """Return whether the outputs of two runs match: equally many tensors, each `difference` at most `tolerance`."""
    return len(got) == len(wanted) and all(difference(g, w) <= tolerance for g, w in zip(got, wanted, strict=True))


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest absolute difference, divided by the largest finite absolute value of `wanted`.

    Two NaNs at the same place are equal. The result is infinity if the shapes differ, or if only one tensor has a NaN
    at a place. It is also infinity if tensors that are not floating-point differ.
    """
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
