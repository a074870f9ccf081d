"""Which calls of `generate` may share a batch with others, and how they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_ARGUMENTS = ("input_ids", "attention_mask", "generation_config")
# Settings of `generate` that a row of a batch has not, or not yet.
_NEEDS_A_LOOP_OF_ITS_OWN = (
    "num_beams", "num_return_sequences", "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens",
    "assistant_early_exit", "constraints", "force_words_ids", "token_healing", "guidance_scale", "watermarking_config",
    "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
    "cache_implementation", "cache_config", "compile_config", "prefill_chunk_size", "max_time", "stop_strings",
)  # fmt: skip


def shared_arguments(model: Any, given: Mapping[str, Any], seed: int | None) -> dict[str, Any] | str:
    """The arguments of a call whose row may join others; else why it runs alone.

    Args:
        model: the caller's; its settings hold where the call says nothing.
        given: arguments of `generate` by name.
        seed: of the call's random stream. Calls that draw from the caller's generator have no order among each other.
    """
    kwargs = dict(given)
    if "inputs" in kwargs:
        kwargs["input_ids"] = kwargs.pop("inputs")
    config = kwargs.get("generation_config") or model.generation_config
    for name in kwargs:
        if name not in _ARGUMENTS and not hasattr(config, name):
            return f"it has {name}"

    def setting(name: str) -> Any:
        return kwargs.get(name, getattr(config, name, None))

    for name in _NEEDS_A_LOOP_OF_ITS_OWN:
        if setting(name) not in (None, False, 1):
            return f"it has {name}"
    if setting("use_cache") is False:
        return "it uses no cache"
    if setting("do_sample") and seed is None:
        return "it samples without a seed"
    ids, mask = kwargs.get("input_ids"), kwargs.pop("attention_mask", None)
    words = model.config.get_text_config().vocab_size
    if (
        type(ids) is not torch.Tensor
        or ids.dtype != torch.long
        or ids.ndim != 2
        or ids.shape[0] != 1
        or not ids.numel()
    ):
        return "it is not one prompt of token ids"
    if mask is not None and (mask.shape != ids.shape or not bool((mask == 1).all())):
        return "its prompt is masked"
    if int(ids.min()) < 0 or int(ids.max()) >= words:
        return "an id is out of range"  # for which all rows of a batch would fail
    return kwargs
