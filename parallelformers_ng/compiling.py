"""`parallelize(compile=True)`: the decode steps of `generate` go through `torch.compile`, over caches of a fixed size.

transformers compiles the forward of a decode step where the cache is static; the prompt's own pass stays as it is. What
is added here is to ask for it, where it is possible, and to say so where it is not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import CompileConfig, PreTrainedModel

from parallelformers_ng.errors import ParallelError

_CACHES = ("past_key_values", "cache_params")
_ASSISTED = ("prompt_lookup_num_tokens", "assistant_early_exit", "custom_generate")


def compile_config(asked: bool | CompileConfig, device: str, world_size: int) -> CompileConfig | None:
    """How the workers compile, None where they do not.

    Args:
        asked: what `parallelize` was given.
        device: "cpu" or "cuda".
        world_size: number of ranks. A step of one rank becomes a CUDA graph; that of several has collectives in it, and
            is compiled in pieces around them.

    Raises:
        ParallelError: `asked` is something else.
    """
    if asked is False:
        return None
    if isinstance(asked, CompileConfig):
        config = copy.deepcopy(asked)
    elif asked is not True:
        raise ParallelError(f"compile is {asked!r}; it takes True, False or a transformers CompileConfig")
    else:
        config = CompileConfig(mode="reduce-overhead" if device == "cuda" and world_size == 1 else "default")
    config._compile_all_devices = True  # transformers by itself compiles on accelerators alone
    return config


def compiled_generation(
    model: PreTrainedModel, arguments: Mapping[str, Any], config: CompileConfig
) -> tuple[dict[str, Any], str]:
    """The arguments of a call of `generate` with what makes it compile its steps.

    Returns:
        The arguments; and why they are as they were, "" where they are not.
    """
    given = {**arguments}
    if reason := _obstacle(model, given):
        return given, reason
    return {"cache_implementation": "static", "compile_config": config, **given}, ""


def _obstacle(model: PreTrainedModel, arguments: dict[str, Any]) -> str:
    """Why this call cannot be compiled, in words; "" where it can."""
    generation_config = arguments.get("generation_config") or model.generation_config

    def asked(name: str) -> Any:
        return arguments[name] if name in arguments else getattr(generation_config, name, None)

    if not model._can_compile_fullgraph:
        return f"transformers does not compile {type(model).__name__}"
    if any(arguments.get(name) is not None for name in _CACHES):
        return "the caller's cache is used"
    if asked("cache_implementation") not in (None, "static"):
        return f"cache_implementation={asked('cache_implementation')!r} was asked for"
    if asked("use_cache") is False:
        return "use_cache is False"
    if asked("disable_compile"):
        return "disable_compile was asked for"
    if any(asked(name) is not None for name in _ASSISTED):
        return "assisted decoding crops its cache"
    return ""
