"""`parallelize(decode="compile")` and `"cuda_graphs"`: decode steps over caches of a fixed size.

transformers compiles the forward of a decode step if the cache is static; the prompt's pass stays plain. This file asks
for that if it is possible, and says so if it is not. Steps that become CUDA graphs need the same cache and no compiler;
`captured.py` does the rest, on the workers. On CUDA devices that is the default, for calls that would not notice, until
a device shows that it cannot.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from transformers import CompileConfig, PreTrainedModel

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.sharding.cache_names import CACHES

Decode: TypeAlias = Literal["auto", "eager", "compile", "cuda_graphs"] | CompileConfig
NO_DEVICE = "there is no CUDA device to capture on"
MOST_POSITIONS = 1 << 14
"""Of a cache that nobody asked for. For 8 billion parameters it is an eighth of what a step reads of weights."""
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
_ASSISTED = ("prompt_lookup_num_tokens", "assistant_early_exit", "custom_generate")


@dataclass(frozen=True)
class StaticSteps:
    """How the decode steps of `generate` are made faster.

    Attributes:
        options: arguments of `generate` that ask for it.
        without: message for a call that cannot have it.
        captured: whether they become CUDA graphs.
        by_default: whether the mode is a default. A call then uses it only if its answer is of the same
            kind without it, and no call uses it after a failure.
    """

    options: Mapping[str, Any]
    without: str
    captured: bool = False
    by_default: bool = False


def static_steps(decode: Decode, device: str, world_size: int) -> tuple[StaticSteps | None, str]:
    """Return the decode mode of `parallelize`.

    Args:
        decode: its argument.
        device: "cpu" or "cuda".
        world_size: number of ranks. A compiled step of one rank becomes a CUDA graph; that of several has collectives
            in it, and is compiled in pieces around them.

    Returns:
        How decode steps run, None for as they are; and why that is not as asked, "" if it is.

    Raises:
        ParallelError: `decode` is something else, or has each of several ranks make CUDA graphs of what it compiles.
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
    config._compile_all_devices = True  # transformers by itself compiles on accelerators alone
    return StaticSteps({"compile_config": config}, "generate runs without compiled steps"), ""


def _refuse_graphs(config: Any, world_size: int) -> None:
    """A compiler that makes CUDA graphs of a step takes the exchanges between ranks in it for nothing of its own."""
    options = getattr(config, "options", None) or {}
    makes_graphs = getattr(config, "mode", None) in _WITH_GRAPHS or options.get("triton.cudagraphs")
    if world_size > 1 and makes_graphs:
        raise ParallelError(
            f"the compiler is asked for mode {config.mode!r}, which makes CUDA graphs of compiled steps; that works on"
            f" one rank, and there are {world_size}. Pass mode='default', or decode='cuda_graphs', whose graphs have"
            " NCCL's exchanges in them"
        )


CAPTURED = StaticSteps({"disable_compile": True}, "generate runs without CUDA graphs", captured=True)
CAPTURED_BY_DEFAULT = replace(CAPTURED, by_default=True)


def static_generation(
    model: PreTrainedModel, arguments: Mapping[str, Any], steps: StaticSteps
) -> tuple[dict[str, Any], str]:
    """Return the arguments of a call of `generate` with what makes its steps go as asked.

    Returns:
        The arguments; and why they are as they were, "" if they are not.
    """
    static = {**arguments}
    if reason := _obstacle(model, static, steps):
        return static, reason
    if steps.captured:
        return {"cache_implementation": "static", **static, **steps.options}, ""
    return {"cache_implementation": "static", **steps.options, **static}, ""


def check_compiler(model: PreTrainedModel, arguments: Mapping[str, Any], world_size: int) -> None:
    """See that a call of `generate` on CUDA devices may be compiled as its caller says, if he does.

    Raises:
        ParallelError: each of several ranks would make CUDA graphs of what it compiles.
    """
    config = arguments.get("generation_config") or model.generation_config
    _refuse_graphs(arguments.get("compile_config", getattr(config, "compile_config", None)), world_size)


def eager_generation(model: PreTrainedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `generate` whose steps are to run as they are, on CUDA devices.

    On accelerators transformers compiles steps over a static cache by default, in a mode that records CUDA graphs. With
    several ranks, each would record the others' exchanges. If the caller says how to compile, that holds.
    """
    eager = {**arguments}
    config = eager.get("generation_config") or model.generation_config
    said = any(eager.get(name, getattr(config, name, None)) for name in ("compile_config", "disable_compile"))
    fixed = eager.get("cache_implementation", getattr(config, "cache_implementation", None))
    if not said and (fixed is not None or any(eager.get(name) is not None for name in CACHES)):
        eager["disable_compile"] = True
    return eager


def _positions(arguments: Mapping[str, Any], setting: Callable[[str], Any]) -> int:
    """Return rows × tokens that the cache of a call must have room for."""
    inputs = (arguments.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))
    rows, tokens = next((prompt.shape[:2] for prompt in inputs if prompt is not None), (1, 1))
    new = setting("max_new_tokens")
    tokens = tokens + new if new is not None else setting("max_length") or tokens
    return int(rows * tokens * max(setting("num_beams") or 1, setting("num_return_sequences") or 1))


def _obstacle(model: PreTrainedModel, arguments: dict[str, Any], steps: StaticSteps) -> str:
    """Return why the steps of this call cannot be compiled or captured, in words; "" if they can."""
    generation_config = arguments.get("generation_config") or model.generation_config

    def setting(name: str) -> Any:
        return arguments[name] if name in arguments else getattr(generation_config, name, None)

    if not model._can_compile_fullgraph:
        return f"transformers does not compile {type(model).__name__}, whose steps are no single graph"
    if any(arguments.get(name) is not None for name in CACHES):
        return "the caller's cache is used"
    if setting("cache_implementation") not in (None, "static"):
        return f"cache_implementation={setting('cache_implementation')!r} was asked for"
    if setting("use_cache") is False:
        return "use_cache is False"
    if setting("disable_compile") and not steps.captured:
        return "disable_compile was asked for"
    if setting("compile_config") is not None and steps.captured:
        return "compile_config was asked for"
    if setting("prefill_chunk_size") is not None and steps.captured:
        return "prefill_chunk_size was asked for"
    if steps.captured and model.training:
        return "the model is in training mode"
    if steps.captured and torch.is_autocast_enabled():
        return "torch.autocast is on"
    if setting("return_dict_in_generate") and steps.by_default:
        return "the cache, which could not grow, may be handed out"
    if steps.by_default and (positions := _positions(arguments, setting)) > MOST_POSITIONS:
        return f"each step would read a cache of {positions} positions, empty ones too; {MOST_POSITIONS} at most"
    if any(setting(name) is not None for name in _ASSISTED):
        return "assisted decoding crops its cache"
    if model.config.model_type == "falcon" and model.config.alibi:
        return "Falcon's alibi takes a mask of two dimensions"  # and transformers gives it one of four
    if steps.captured and model.config.is_encoder_decoder:
        return "an encoder-decoder keeps two caches"
    return ""
