"""Makes a twin: shrinks a configuration, builds the model, draws its parameters."""

from __future__ import annotations

import contextlib
import copy
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from parallelformers_ng.autopolicy.candidate_inputs import candidate_inputs
from parallelformers_ng.autopolicy.config_numbers import long_tables, shapes_of
from parallelformers_ng.autopolicy.layer_kinds import absent_kinds
from parallelformers_ng.autopolicy.live_edits import LiveEdits
from parallelformers_ng.autopolicy.shrink import Shrinking, shrink
from parallelformers_ng.autopolicy.shrink_trial import shrink_by_trial
from parallelformers_ng.autopolicy.twin import Twin
from parallelformers_ng.autopolicy.twin_observation import DRAWS, observe, observe_single_layers
from parallelformers_ng.errors import UnsupportedModelError

_COMFORTABLE = 8_000_000
_LARGEST = 60_000_000
_DEEPEST = 8
"""Layers beyond which a twin is not made deeper to show a further kind of them."""
_SECONDS = 3.0
"""Processor time after which no further size is tried, in the hope that more of the model runs."""
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
"""Order the shrinkings to try: comfortable sizes first, then bearable ones."""


def make_twin(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    attention: str | None = None,
    seed: int = 0,
    layers: int = Shrinking.layers,
    edits: LiveEdits | None = None,
) -> Twin:
    """Build a twin, and find inputs for it and for its parts.

    Args:
        cls: the model's class.
        config: its configuration; a small one is taken as it is.
        attention: attention implementation, "eager", "sdpa", ….
        seed: seed of its parameters and inputs.
        layers: least number of layers, if the model has as many.
        edits: code that the program has changed since the class built the model.

    Raises:
        UnsupportedModelError: it cannot be built small or be given that code, or no inputs were found on which it runs.
    """
    failures: list[str] = []
    best: Twin | None = None
    end = time.thread_time() + _SECONDS
    least = first_choice(cls, config, layers)
    for model in _models(cls, config, attention, seed, least, failures):
        if edits:
            edits.apply(model)
            randomise(model, seed)
        try:
            twin = observe(model, seed + 1)
        except Exception as error:  # modelling code raises anything on what is too small for it
            failures.append(_in_short(error))
            continue
        if twin.runs_whole:
            best = twin
            break
        if best is None or len(twin.gradients) > len(best.gradients):
            best = twin
        # A larger copy draws as well; if it draws a length, that may be endless.
        if time.thread_time() > end or twin.unreached.startswith(DRAWS):
            break
    if best is not None:
        best = observe_single_layers(best, seed + 1)
    if best is None or not best.probes:
        reason = [*failures, best.unreached[:300] if best else "", "still too large"]
        raise UnsupportedModelError(f"no tiny twin of {cls.__name__}: {next(filter(None, reason))}")
    return best


def first_choice(cls: type[PreTrainedModel], config: PreTrainedConfig, layers: int = Shrinking.layers) -> Shrinking:
    """Return the settings to spare at first, and the fewest layers that show all kinds that a small copy can have."""
    whole = _skeleton(cls, config)
    if whole is None:
        return Shrinking(layers=layers)
    least = Shrinking(shapes=shapes_of(whole), layers=layers)
    least = replace(least, shapes=replace(least.shapes, windows=_sizes_follow_windows(cls, config, least)))
    choice = {}
    while least.layers <= _DEEPEST:
        small = _skeleton(cls, shrink(config, least))
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
    """Return whether a small copy has other parameters where its windows stay long: so many queries a window, for
    example."""
    short = shrink(config, least)
    long = shrink(config, replace(least, shapes=replace(least.shapes, windows=True)))
    if short.to_dict() == long.to_dict():
        return False
    models = [_skeleton(cls, small) for small in (short, long)]
    sizes = [model and [parameter.shape for parameter in model.parameters()] for model in models]
    return sizes[0] != sizes[1]


def _skeleton(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel | None:
    """Return the model without weights; None if it cannot be built so, as the next size may be to its taste."""
    try:
        with torch.device("meta"):
            return cls._from_config(copy.deepcopy(config))
    except Exception:  # the modelling code decides what it refuses
        return None


def _models(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    attention: str | None,
    seed: int,
    least: Shrinking,
    failures: list[str],
) -> Iterator[PreTrainedModel]:
    """Smaller and larger copies, the most welcome first; `failures` takes down why others could not be built."""
    waiting: Sequence[Shrinking] = _SHRINKS
    seen: set[str] = set()
    for largest in (_COMFORTABLE, _LARGEST):
        too_large = []
        for shrinking in waiting:
            try:
                small = shrink(config, replace(shrinking, layers=least.layers, shapes=least.shapes))
                shape = json.dumps(small.to_dict(), sort_keys=True, default=str)
                if shape in seen:
                    continue
                model = build_tiny(cls, small, attention, seed, largest)
            except Exception as error:  # the modelling code decides what it refuses; the next size may be to its taste
                failures.append(_in_short(error))
                continue
            if model is None:
                too_large.append(shrinking)
                continue
            seen.add(shape)
            yield model
        waiting = too_large
        if not seen and (tried := _by_trial(cls, config, least)) is not None:
            model = build_tiny(cls, tried, attention, seed, largest)
            if model is not None:
                yield model


def _by_trial(cls: type[PreTrainedModel], config: PreTrainedConfig, least: Shrinking) -> PreTrainedConfig | None:
    """Make a small copy of a configuration whose settings use unknown words for sizes, or allow fewer changes than
    usual."""

    whole = _skeleton(cls, config)
    taken = None if whole is None else _taken_on_meta(whole)

    def weigh(tried: PreTrainedConfig) -> int | None:
        skeleton = _skeleton(cls, tried)
        return None if skeleton is None else sum(parameter.numel() for parameter in skeleton.parameters())

    def runs(tried: PreTrainedConfig) -> bool:
        skeleton = _skeleton(cls, tried)
        return taken is None or (skeleton is not None and _taken_on_meta(skeleton, taken) is not None)

    for shrinking in (least, _SHRINKS[-1]):
        small = shrink_by_trial(shrink(config, shrinking), weigh, _COMFORTABLE // 2, runs)
        if small is not None:
            return small
    return shrink_by_trial(config, weigh, _COMFORTABLE // 2, runs)


def _taken_on_meta(skeleton: PreTrainedModel, only: int | None = None) -> int | None:
    """Return the number of the first inputs that the forward of a model without weights takes; None if it takes
    none. One that looks at values takes none.

    Args:
        only: names of the inputs to try; None for all.
    """
    with torch.inference_mode(), torch.device("meta"):
        for number, arguments in enumerate(candidate_inputs(skeleton)):
            if only not in (None, number):
                continue
            on_meta = {n: a.to("meta") if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
            with contextlib.suppress(Exception):  # the modelling code decides what it refuses
                skeleton(**on_meta)
                return number
    return None


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def build_tiny(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    attention: str | None = None,
    seed: int = 0,
    largest: int = _LARGEST,
) -> PreTrainedModel | None:
    """Return a random model in evaluation mode, or None if it would have more than `largest` parameters."""
    options = {"attn_implementation": attention} if attention else {}
    try:
        with torch.device("meta"):
            skeleton = cls._from_config(copy.deepcopy(config), **options)
    except ValueError:  # a part does not know this implementation: each takes the one it would by itself
        options = {}
        with torch.device("meta"):
            skeleton = cls._from_config(copy.deepcopy(config))
    if sum(p.numel() for p in skeleton.parameters()) > largest:
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
                parameter.copy_(noise * (1.0 / max(1, parameter.numel() // max(1, parameter.shape[0])) ** 0.5))
            else:
                parameter.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(-10.0, 10.0)
                parameter.add_(0.2 * noise)
