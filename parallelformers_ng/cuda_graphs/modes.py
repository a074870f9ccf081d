"""Chooses how `parallelize(decode=…)` runs decode steps: compiled, as CUDA graphs, or unchanged.

transformers compiles the forward pass of a decode step if the cache is static; the prefill is not compiled. This
module sets the arguments of `generate` for compiled steps if a call supports them, and otherwise returns the reason.
Steps that become CUDA graphs also need a static cache but no compiler; `captured.py` records the steps on the
workers. On CUDA devices CUDA graphs are the default for calls whose kind of result stays the same, until a device
fails to record a step.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from transformers import CompileConfig, PreTrainedModel
from transformers.masking_utils import create_chunked_causal_mask

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.sharding.cache_names import CACHES

Decode: TypeAlias = Literal["auto", "eager", "compile", "cuda_graphs"] | CompileConfig
NO_DEVICE = "there is no CUDA device to capture on"
# Static caches that the caller did not request have at most this number of rows × tokens, because each step reads the
# whole cache. With 8 billion parameters, such a cache has an eighth of the bytes of the weights.
MAX_POSITIONS = 1 << 14
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "custom_generate")


@dataclass(frozen=True)
class StaticSteps:
    """A way to run the decode steps of `generate` faster, over a static cache.

    Attributes:
        options: arguments of `generate` that turn it on.
        without: log message for a call whose steps cannot run in this way.
        captured: whether the steps become CUDA graphs, instead of being compiled.
        by_default: whether the caller did not request it. Then only calls whose answers keep their types use it, and no
            call after a failure.
    """

    options: Mapping[str, Any]
    without: str
    captured: bool = False
    by_default: bool = False


def static_steps(decode: Decode, device: str, world_size: int) -> tuple[StaticSteps | None, str]:
    """Return how to run decode steps for the argument `decode` of `parallelize`, or None for ordinary steps; and why
    the requested way is not used, or "".

    With one rank, a compiled step becomes a CUDA graph. With several ranks, the compiler splits a step at its
    collectives.
    """
    if decode == "cuda_graphs":
        return (CAPTURED, "") if device == "cuda" else (None, NO_DEVICE)
    if decode in ("auto", "eager"):
        return (CAPTURED_BY_DEFAULT if device == "cuda" and decode == "auto" else None), ""
    if isinstance(decode, CompileConfig):
        if device == "cuda":
            _refuse_graphs(decode, world_size)
        config = copy.deepcopy(decode)
    elif decode == "compile":
        config = CompileConfig(mode="reduce-overhead" if device == "cuda" and world_size == 1 else "default")
    else:
        raise ParallelError(
            f"decode is {decode!r}; it takes 'auto', 'eager', 'compile', 'cuda_graphs' or a transformers CompileConfig"
        )
    config._compile_all_devices = True  # transformers would compile only on accelerators
    return StaticSteps({"compile_config": config}, "generate runs without compiled steps"), ""


def _refuse_graphs(config: Any, world_size: int) -> None:
    """Raise ParallelError if compiled steps would become CUDA graphs with collectives, which torch does not support."""
    options = getattr(config, "options", None) or {}
    makes_graphs = getattr(config, "mode", None) in _WITH_GRAPHS or options.get("triton.cudagraphs")
    if world_size > 1 and makes_graphs:
        raise ParallelError(
            f"the compiler's mode is {config.mode!r}, which makes CUDA graphs of compiled steps; this mode supports one"
            f" rank, but the model has {world_size} ranks. Pass mode='default', or decode='cuda_graphs', whose graphs"
            " support collectives"
        )


CAPTURED = StaticSteps({"disable_compile": True}, "generate runs without CUDA graphs", captured=True)
CAPTURED_BY_DEFAULT = replace(CAPTURED, by_default=True)


def static_generation(
    model: PreTrainedModel, arguments: Mapping[str, Any], steps: StaticSteps
) -> tuple[dict[str, Any], str]:
    """Add the options of `steps` to the arguments of a `generate` call. Return the new arguments, and "".

    If the call cannot run in this way, return its arguments unchanged, and the reason.
    """
    static = {**arguments}
    if reason := _obstacle(model, static, steps):
        return static, reason
    if steps.captured:
        return {"cache_implementation": "static", **static, **steps.options}, ""
    return {"cache_implementation": "static", **steps.options, **static}, ""


def check_compiler(model: PreTrainedModel, arguments: Mapping[str, Any], world_size: int) -> None:
    """Raise ParallelError if a `generate` call on CUDA devices would compile collectives into CUDA graphs."""
    config = arguments.get("generation_config") or model.generation_config
    _refuse_graphs(arguments.get("compile_config", getattr(config, "compile_config", None)), world_size)


def eager_generation(model: PreTrainedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a `generate` call on CUDA devices, changed so that transformers compiles no decode step
    by default.

    By default transformers compiles steps over a static cache on accelerators, as CUDA graphs. With several ranks, each
    graph would contain collectives. Compile settings of the caller are kept.
    """
    eager = {**arguments}
    config = eager.get("generation_config") or model.generation_config
    has_settings = any(eager.get(name, getattr(config, name, None)) for name in ("compile_config", "disable_compile"))
    fixed = eager.get("cache_implementation", getattr(config, "cache_implementation", None))
    if not has_settings and (fixed is not None or any(eager.get(name) is not None for name in CACHES)):
        eager["disable_compile"] = True
    return eager


def _positions(arguments: Mapping[str, Any], setting: Callable[[str], Any]) -> int:
    """Return the size of the static cache that a call needs, in rows × tokens."""
    inputs = (arguments.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))
    rows, tokens = next((prompt.shape[:2] for prompt in inputs if prompt is not None), (1, 1))
    new = setting("max_new_tokens")
    tokens = tokens + new if new is not None else setting("max_length") or tokens
    return int(rows * tokens * max(setting("num_beams") or 1, setting("num_return_sequences") or 1))


def _lacks_masks(model: PreTrainedModel) -> bool:
    # transformers 5.17 passes `block_sequence_ids` to a function that does not accept this argument.
    is_chunked = getattr(model.config.get_text_config(), "attention_chunk_size", None) is not None
    return is_chunked and "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters


def _obstacle(model: PreTrainedModel, arguments: dict[str, Any], steps: StaticSteps) -> str:
    """Return why the decode steps of a call cannot run as `steps` says; "" if they can."""
    generation_config = arguments.get("generation_config") or model.generation_config

    def setting(name: str) -> Any:
        return arguments[name] if name in arguments else getattr(generation_config, name, None)

    if not model._can_compile_fullgraph:
        return f"transformers cannot compile a step of {type(model).__name__} as a single graph"
    cache = setting("cache_implementation")
    positions = _positions(arguments, setting) if steps.by_default else 0
    obstacles = {
        "the caller's cache is used": any(arguments.get(name) is not None for name in CACHES),
        f"cache_implementation={cache!r} is set": cache not in (None, "static"),
        "use_cache is False": setting("use_cache") is False,
        "disable_compile is set": setting("disable_compile") and not steps.captured,
        "compile_config is set": setting("compile_config") is not None and steps.captured,
        "prefill_chunk_size is set": setting("prefill_chunk_size") is not None and steps.captured,
        "the model is in training mode": model.training and steps.captured,
        "torch.autocast is on": torch.is_autocast_enabled() and steps.captured,
        "return_dict_in_generate would return a cache that cannot grow": (
            setting("return_dict_in_generate") and steps.by_default
        ),
        f"each step would read a cache of {positions} positions, also empty ones; the limit is {MAX_POSITIONS}": (
            positions > MAX_POSITIONS
        ),
        "assisted decoding crops its cache": any(setting(name) is not None for name in _ASSISTED),
        # For a static cache, transformers makes a mask of four dimensions.
        "Falcon's alibi needs a mask of two dimensions": model.config.model_type == "falcon" and model.config.alibi,
        "this release of transformers makes no masks for chunked attention over a static cache": _lacks_masks(model),
        "an encoder-decoder model has two caches": model.config.is_encoder_decoder and steps.captured,
    }
    return next((reason for reason, is_so in obstacles.items() if is_so), "")
