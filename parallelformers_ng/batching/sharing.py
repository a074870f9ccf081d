"""Decides which calls of `generate` may share a batch, and prepares the calls for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria

from parallelformers_ng.generation.call_arguments import STATEFUL, roots_of
from parallelformers_ng.generation.object_state import ObjectState
from parallelformers_ng.sharding.active_adapters import ActiveAdapters

_ARGUMENTS = ("input_ids", "attention_mask", "generation_config", "tokenizer", *STATEFUL)
# Settings of `generate` that a batch does not support (yet).
_NEEDS_A_LOOP_OF_ITS_OWN = (
    "num_beams", "num_return_sequences", "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens",
    "assistant_early_exit", "constraints", "force_words_ids", "token_healing", "guidance_scale", "watermarking_config",
    "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
    "cache_implementation", "cache_config", "compile_config", "prefill_chunk_size",
)  # fmt: skip
_NEW_TOKENS = 20  # transformers' default number of new tokens


@dataclass
class SharedCall:
    """A call of `generate` that may share a batch with other calls."""

    kwargs: dict[str, Any]  # arguments for the ranks
    seed: int | None  # seed of the call's random stream; None for a call that needs no stream
    tokens: tuple[int, int]  # number of prompt tokens, and most tokens of prompt and answer together
    # Stopping criteria that the caller's process checks: stop strings, which need a tokenizer, and the time limit,
    # because the clocks of the ranks differ.
    endings: StoppingCriteriaList
    objects: ObjectState  # mutable parts of the call's processors and criteria
    adapters: ActiveAdapters | None = None  # active adapters of the call; None for a model without adapters
    priority: int = 0  # calls with a lower number get rows first

    @property
    def prompt(self) -> torch.Tensor:
        """Token ids of the prompt, int64 `[1, tokens]`."""
        return self.kwargs["input_ids"]

    def follow(self, ids: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, bool]:
        """Add new tokens to a sequence, int64 `[1, tokens]`, up to the token that ends the call. Return the longer
        sequence, and whether a new token ends the call."""
        if not self.endings:
            return (torch.cat((ids, ids.new_tensor([tokens])), -1) if tokens else ids), False
        for token in tokens:
            ids = torch.cat((ids, ids.new_tensor([[token]])), -1)
            if bool(self.endings(ids, None)[0]):
                return ids, True
        return ids, False


def shared_call(
    model: Any, arguments: Mapping[str, Any], seed: int | None, draw_seed: Callable[[], int] | None = None
) -> SharedCall | str:
    """Prepare a call for a batch, or return the reason why the call must run alone. Without `draw_seed`, a sampling
    call without a seed must run alone, and draw from the caller's generator."""
    kwargs = {
        name: value for name, value in arguments.items() if value is not None or name not in (*STATEFUL, "tokenizer")
    }
    if "inputs" in kwargs:
        kwargs["input_ids"] = kwargs.pop("inputs")
    config = kwargs.get("generation_config") or model.generation_config
    for name in kwargs:
        if name not in _ARGUMENTS and not hasattr(config, name):
            return f"it has {name}"

    def setting(name: str) -> Any:
        return kwargs.get(name, getattr(config, name, None))

    for name in _NEEDS_A_LOOP_OF_ITS_OWN:
        if setting(name) is True or setting(name) not in (None, False, 1):  # the number 1 means off, but True means on
            return f"it has {name}"
    caches = model.generation_config.use_cache is not False
    if setting("use_cache") is (not caches):
        return "it uses no cache" if caches else "it uses a cache, but the model's other calls do not"
    if setting("do_sample") and seed is None and draw_seed is None:
        return "it samples without a seed"
    ids: Any = kwargs.get("input_ids")
    mask = kwargs.get("attention_mask")
    vocab_size = model.config.get_text_config().vocab_size
    is_one_prompt = type(ids) is torch.Tensor and ids.dtype == torch.long and ids.ndim == 2 and ids.shape[0] == 1
    if not is_one_prompt or not ids.numel():
        return "it is not one prompt of token ids"
    if mask is not None and (mask.shape != ids.shape or not bool(mask[0, -1])):
        return "its mask has another shape than its prompt, or masks the last token"
    if mask is None and int(ids[0, -1]) == setting("pad_token_id"):
        return "its prompt ends with padding"  # transformers counts the positions of such a prompt in another way
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return "a token id is out of range"  # in a batch, such an id would fail all rows
    tokenizer, endings = kwargs.pop("tokenizer", None), StoppingCriteriaList()
    if stop_strings := setting("stop_strings"):
        if tokenizer is None:
            return "it has stop strings and no tokenizer"  # transformers raises an error for this call
        endings.append(StopStringCriteria(tokenizer, stop_strings))
        kwargs["stop_strings"] = None
    if seconds := setting("max_time"):
        endings.append(MaxTimeCriteria(seconds))
        kwargs["max_time"] = None
    if setting("do_sample") and seed is None and draw_seed is not None:
        seed = draw_seed()
    return SharedCall(kwargs, seed, tokens_of(model, arguments), endings, ObjectState(roots_of((), kwargs)))


def tokens_of(model: Any, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Number of prompt tokens of a call of `generate`, and the most tokens of prompt and answer together."""
    config = arguments.get("generation_config") or model.generation_config
    prompts = [arguments.get(name) for name in ("input_ids", "inputs", "inputs_embeds")]
    before = max((each.shape[1] for each in prompts if isinstance(each, torch.Tensor) and each.ndim > 1), default=1)
    new, longest = (arguments.get(name, getattr(config, name, None)) for name in ("max_new_tokens", "max_length"))
    if new is None:
        new = _NEW_TOKENS if longest is None else max(longest - before, 1)
    return before, before + new
