"""A tiny, random copy of a model's architecture, with inputs on which all that can be cut counts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.sharding.probe import candidates
from parallelformers_ng.sharding.shrink import shrink
from parallelformers_ng.sharding.structure import Trace, tensors

_LARGEST = 60_000_000
_SHRINKS: Sequence[tuple[int, bool, bool]] = (
    (0, False, False),
    (1, False, True),
    (0, True, False),
    (2, True, True),
    (3, True, True),
)
"""What to spare, one after another: widths (powers of two), vocabulary, images."""


@dataclass
class Probe:
    """A part of a twin that runs by itself, its inputs and what it answers whole.

    Attributes:
        path: the part's dotted path, "" for the whole.
        inputs: keyword arguments of its forward.
        wanted: the tensors of its output.
    """

    path: str
    inputs: dict[str, Any]
    wanted: list[torch.Tensor]


@dataclass
class Twin:
    """A tiny model and what was seen of it.

    Attributes:
        model: the model, whole, every parameter random, in float64 where its code allows, else in float32.
        probes: what is run to compare.
        calls: module name → order of its first call.
        gradients: parameter name → how much the outputs depend on each of its values, for those on which they do.
        untold: why the probes do not reach some parts, or "".
    """

    model: PreTrainedModel
    probes: list[Probe]
    calls: dict[str, int]
    gradients: dict[str, torch.Tensor]
    untold: str = ""

    @property
    def tolerance(self) -> float:
        """Largest difference that is rounding, relative to the largest value."""
        return 1e-6 if next(self.model.parameters()).dtype == torch.float64 else 1e-4


def make_twin(
    cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str | None = None, seed: int = 0
) -> Twin:
    """Build a twin, and find inputs for it and for its parts.

    Args:
        cls: the model's class.
        config: its configuration; a small one is taken as it is.
        attention: attention implementation, "eager", "sdpa", ….
        seed: of its parameters and inputs.

    Raises:
        UnsupportedModelError: it cannot be built small, or no inputs were found on which it runs.
    """
    failures: list[str] = []
    for spare, keep_vocabulary, keep_images in _SHRINKS:
        try:
            model = build_tiny(cls, shrink(config, spare, keep_vocabulary, keep_images), attention, seed)
            if model is None:
                failures.append("still too large")
                continue
            return _observe(model, seed + 1)
        except UnsupportedModelError as error:
            failures.append(str(error))
        except Exception as error:  # the modelling code decides what it refuses; the next size may be to its taste
            failures.append(f"{type(error).__name__}: {error}".partition("\n")[0][:200])
    raise UnsupportedModelError(f"no tiny twin of {cls.__name__}: {failures[0]}")


def build_tiny(
    cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str | None = None, seed: int = 0
) -> PreTrainedModel | None:
    """A random model in evaluation mode, or None where it would be too large to be tiny."""
    options = {"attn_implementation": attention} if attention else {}
    with torch.device("meta"):
        skeleton = cls._from_config(copy.deepcopy(config), **options)
    if sum(p.numel() for p in skeleton.parameters()) > _LARGEST:
        return None
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = cls._from_config(copy.deepcopy(config), **options)
    randomise(model, seed)
    return model.eval()


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Draw every floating-point parameter anew: zero biases and unit norms hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.ndim >= 2:
                parameter.copy_(noise * (1.0 / max(1, parameter[0].numel()) ** 0.5))
            else:
                parameter.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                parameter.add_(0.2 * noise)


def run(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The output's tensors; the inputs are copied first, as some forwards write to them."""
    given = {
        name: (value.to(dtype) if dtype and value.is_floating_point() else value.clone())
        if isinstance(value, torch.Tensor)
        else copy.copy(value)
        for name, value in inputs.items()
    }
    return list(tensors(model(**given)))


def equal(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> bool:
    """Whether two runs gave the same, up to rounding."""
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


def _observe(model: PreTrainedModel, seed: int) -> Twin:
    """Find probes in float64, where nothing but a wrong cut makes a difference; in float32 where that reaches more."""
    exact = _probe_all(model.to(torch.float64), seed)
    if exact.probes and not exact.probes[0].path:
        return exact
    plain = _probe_all(copy.deepcopy(model).to(torch.float32), seed)
    best = exact if len(exact.gradients) > len(plain.gradients) else plain
    if not best.probes:
        raise UnsupportedModelError(f"no inputs found on which {type(model).__name__} runs: {plain.untold[:300]}")
    return best


def _probe_all(model: PreTrainedModel, seed: int) -> Twin:
    """Probe the model, and those of its parts that this does not reach."""
    twin = Twin(model, [], {}, {})
    refusals = [_probe(model, "", seed, twin.probes, twin.calls, twin.gradients)]
    for path, part in model.named_modules():
        if path and isinstance(part, PreTrainedModel) and not _reached(part, path, twin.gradients):
            refusal = _probe(part, path, seed, twin.probes, twin.calls, twin.gradients)
            refusals.append(f"{path}: {refusal}" if refusal else "")
    twin.untold = "; ".join(refusal for refusal in refusals if refusal)
    return twin


def _reached(part: nn.Module, path: str, gradients: dict[str, torch.Tensor]) -> bool:
    """Whether most of a part's large parameters count already."""
    large = [name for name, p in part.named_parameters() if p.ndim >= 2]
    return not large or sum(f"{path}.{name}" in gradients for name in large) >= 0.7 * len(large)


def _probe(
    part: nn.Module,
    path: str,
    seed: int,
    probes: list[Probe],
    calls: dict[str, int],
    gradients: dict[str, torch.Tensor],
) -> str:
    """Add a probe of one part; returns why there is none, or ""."""
    refusal = "its forward takes none of the known inputs"
    for inputs in candidates(part, seed):
        if not inputs:
            continue
        try:
            with torch.random.fork_rng(devices=[]), Trace(part) as trace:
                torch.manual_seed(0)
                outputs = run(part, inputs)
            with torch.no_grad():
                again = run(part, inputs)
        except Exception as error:  # whatever the modelling code raises on inputs that are not its own
            text = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            refusal = text if refusal.startswith("its forward") else refusal
            continue
        floats = [o for o in outputs if o.is_floating_point()]
        if not floats or not any(o.isfinite().any() and o.numel() for o in floats):
            refusal = "its outputs are not numbers"
            continue
        if not equal(again, [o.detach() for o in outputs], 1e-9):
            refusal = "its forward draws random numbers: two runs differ"
            continue
        _differentiate(part, path, floats, gradients)
        prefix = f"{path}." if path else ""
        start = len(calls)
        for name, order in trace.calls.items():
            calls.setdefault(f"{prefix}{name}" if name else path, start + order)
        probes.append(Probe(path, inputs, [o.detach().clone() for o in outputs]))
        return ""
    return refusal


def _differentiate(
    part: nn.Module, path: str, outputs: Sequence[torch.Tensor], gradients: dict[str, torch.Tensor]
) -> None:
    """What the outputs depend on: the gradient of a random sum of them."""
    generator = torch.Generator().manual_seed(7)
    total: Any = 0.0
    for output in outputs:
        if output.requires_grad:
            weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
            total = total + (output.nan_to_num(0.0, 0.0, 0.0) * weights).sum()
    if not isinstance(total, torch.Tensor):
        return
    named = [(name, p) for name, p in part.named_parameters(remove_duplicate=False) if p.requires_grad]
    found = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    for (name, _), gradient in zip(named, found, strict=True):
        if gradient is not None:
            seen = gradient.nan_to_num(1.0, 1.0, 1.0).abs()
            if bool(seen.any()):
                full = f"{path}.{name}" if path else name
                gradients[full] = seen + gradients.get(full, torch.zeros(()))
