"""Makes a twin: shrinks a configuration, builds the model, and draws random parameters."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from parallelformers_ng.autopolicy.candidate_inputs import candidate_inputs
from parallelformers_ng.autopolicy.config_numbers import absent_kinds, long_tables, shapes_of
from parallelformers_ng.autopolicy.live_edits import LiveEdits
from parallelformers_ng.autopolicy.own_draws import OwnDraws
from parallelformers_ng.autopolicy.shrink import Shrinking, shrink
from parallelformers_ng.autopolicy.shrink_trial import shrink_by_trial
from parallelformers_ng.autopolicy.twin import Twin, failure_of
from parallelformers_ng.autopolicy.twin_observation import DRAWS, observe, observe_single_layers
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.live_code.replaced import built_on_meta
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

_COMFORTABLE = 8_000_000
_LARGEST = 60_000_000
_DEEPEST = 8  # a twin gets at most 8 layers, if that many are needed to include more kinds of layers
_SECONDS = 3.0  # CPU time after which a small copy that runs only in parts is good enough, and no larger copy is made
# Sizes of twins to try in this order, first those with at most _COMFORTABLE parameters, then with at most _LARGEST.
_SHRINKS: Sequence[Shrinking] = (
    Shrinking(),
    Shrinking(keep_vocabulary=True),
    Shrinking(heads=3),
    Shrinking(spare=1),
    Shrinking(filters=True),
    Shrinking(spare=1, keep_images=True),
    Shrinking(spare=2, keep_vocabulary=True, keep_images=True),
    Shrinking(spare=3, keep_vocabulary=True, keep_images=True),
    Shrinking(spare=12, keep_vocabulary=True, keep_images=True),
)


@torch.inference_mode(False)
@torch.enable_grad()  # a twin needs gradients, even if the caller has switched them off
def make_twin(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    seed: int = 0,
    layers: int = Shrinking.layers,
    edits: LiveEdits | None = None,
) -> Twin:
    """Build a twin, and find inputs for the twin and for its parts.

    A twin has at most 60 million parameters. After 3 s of processor time, a twin that runs only in parts is
    accepted.
    """
    failures: list[str] = []
    best: Twin | None = None
    end = time.thread_time() + _SECONDS
    least = first_choice(cls, config, layers)
    for model in _models(cls, config, seed, least, failures):
        if edits:
            edits.apply(model)
            randomise(model, seed)
        try:
            twin = observe(model, seed + 1)
        except Exception as error:  # modelling code may raise any exception if the model is too small
            failures.append(failure_of(error))
            continue
        if best is None or twin.runs_whole or len(twin.gradients) > len(best.gradients):
            best = twin
        # A larger copy would draw random numbers, too; a copy that draws a random length might run forever.
        if twin.runs_whole or time.thread_time() > end or twin.unreached.startswith(DRAWS):
            break
    if best is not None and observe_single_layers(best, seed + 1).probes:
        return best
    reasons = [*failures, best.unreached[:300] if best else "", "still too large"]
    raise UnsupportedModelError(f"no tiny twin of {cls.__name__}: {next(filter(None, reasons))}")


def first_choice(cls: type[PreTrainedModel], config: PreTrainedConfig, layers: int = Shrinking.layers) -> Shrinking:
    whole = built_on_meta(cls, config)
    if whole is None:
        return Shrinking(layers=layers)
    least = Shrinking(shapes=shapes_of(whole), layers=layers)
    least = replace(least, shapes=replace(least.shapes, windows=_sizes_follow_windows(cls, config, least)))
    choice = {}
    while least.layers <= _DEEPEST:
        small = built_on_meta(cls, shrink(config, least))
        if small is None:
            break
        least = replace(least, shapes=replace(least.shapes, tables=least.shapes.tables | long_tables(small)))
        absent = absent_kinds(whole, small)
        choice[least.layers] = len(absent)
        if not absent:
            break
        least = replace(least, layers=max(least.layers + 1, min(absent.values()) + 1))
    layers = min(choice, key=lambda layers: (choice[layers], layers), default=layers)
    return replace(least, layers=layers)


def _sizes_follow_windows(cls: type[PreTrainedModel], config: PreTrainedConfig, least: Shrinking) -> bool:
    """Return whether parameter shapes of a small copy change with the length of its windows."""
    short = shrink(config, least)
    long = shrink(config, replace(least, shapes=replace(least.shapes, windows=True)))
    if short.to_dict() == long.to_dict():
        return False
    models = [built_on_meta(cls, small) for small in (short, long)]
    sizes = [model and [parameter.shape for parameter in model.parameters()] for model in models]
    return sizes[0] != sizes[1]


def _models(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    seed: int,
    least: Shrinking,
    failures: list[str],
) -> Iterator[PreTrainedModel]:
    """Yield small random models, the best size first; add the reasons of failed builds to `failures`."""
    waiting: Sequence[Shrinking] = _SHRINKS
    seen: list[dict[str, Any]] = []
    for largest in (_COMFORTABLE, _LARGEST):
        too_large = []
        for shrinking in waiting:
            try:
                small = shrink(config, replace(shrinking, layers=least.layers, shapes=least.shapes))
                if small.to_dict() in seen:
                    continue
                model = build_tiny(cls, small, seed, largest)
            except Exception as error:  # modelling code may raise anything at this size, but accept the next size
                failures.append(failure_of(error))
                continue
            if model is None:
                too_large.append(shrinking)
            else:
                seen.append(small.to_dict())
                yield model
        waiting = too_large
        if not seen and (small_config := _by_trial(cls, config, least)) is not None:
            model = build_tiny(cls, small_config, seed, largest)
            if model is not None:
                yield model


def _by_trial(cls: type[PreTrainedModel], config: PreTrainedConfig, least: Shrinking) -> PreTrainedConfig | None:
    whole = built_on_meta(cls, config)
    accepted = None if whole is None else _accepted_on_meta(whole)

    def weigh(smaller: PreTrainedConfig) -> int | None:
        skeleton = built_on_meta(cls, smaller)
        return None if skeleton is None else _size(skeleton)

    def runs(smaller: PreTrainedConfig) -> bool:
        skeleton = built_on_meta(cls, smaller)
        return accepted is None or (skeleton is not None and _accepted_on_meta(skeleton, accepted) is not None)

    for shrinking in (least, _SHRINKS[-1]):
        small = shrink_by_trial(shrink(config, shrinking), weigh, _COMFORTABLE // 2, runs)
        if small is not None:
            return small
    return shrink_by_trial(config, weigh, _COMFORTABLE // 2, runs)


def _accepted_on_meta(skeleton: PreTrainedModel, only: int | None = None) -> int | None:
    """Return the index of the first candidate inputs on which a model on `meta` runs; None if all inputs fail.

    A forward that reads values of its inputs cannot run on `meta`.
    """
    with torch.inference_mode(), torch.device("meta"):
        for number, arguments in enumerate(candidate_inputs(skeleton)):
            if only not in (None, number):
                continue
            on_meta = {n: a.to("meta") if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
            try:
                skeleton(**on_meta)
            except Exception as error:  # modelling code may raise any exception on inputs that it refuses
                raise_if_of_handler(error)
                continue
            return number
    return None


def build_tiny(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    seed: int = 0,
    largest: int = _LARGEST,
) -> PreTrainedModel | None:
    """Return a random model in evaluation mode; None if the model would have more than `largest` parameters.

    The state of the caller's random generators stays unchanged. Modelling code may raise if it refuses the
    configuration.
    """
    with torch.device("meta"):
        if _size(cls._from_config(copy.deepcopy(config))) > largest:
            return None
    with OwnDraws(seed), warnings.catch_warnings(action="ignore"):
        model = cls._from_config(copy.deepcopy(config))
    randomise(model, seed)
    return model.eval()


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Replace matrices by random values and add noise to vectors, because zero biases and unit norms hide mistakes.

    The parameters change in place. A matrix gets normal values whose variance is one divided by the elements of a row.
    A vector is clamped to ±10, and gets normal noise with the deviation 0.2.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.ndim >= 2:
                parameter.copy_(noise * (1.0 / max(1, parameter.numel() // max(1, parameter.shape[0])) ** 0.5))
            else:
                parameter.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(-10.0, 10.0)
                parameter.add_(0.2 * noise)
