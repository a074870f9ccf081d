"""Decides which calls of `generate` may share a batch, and packs them for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria

from parallelformers_ng.generation.object_state import STATEFUL, ObjectState, stateful_arguments
from parallelformers_ng.sharding.active_adapters import ActiveAdapters

_ARGUMENTS = ("input_ids", "attention_mask", "generation_config", "tokenizer", *STATEFUL)
# Settings of `generate` that a row of a batch has not, or not yet.
_NEEDS_A_LOOP_OF_ITS_OWN = (
    "num_beams", "num_return_sequences", "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens",
    "assistant_early_exit", "constraints", "force_words_ids", "token_healing", "guidance_scale", "watermarking_config",
    "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
    "cache_implementation", "cache_config", "compile_config", "prefill_chunk_size",
)  # fmt: skip
_NEW_TOKENS = 20  # of a call that sets no limit, in transformers


@dataclass
class SharedCall:
    """A call of `generate` whose row may join others.

    Attributes:
        kwargs: arguments for the ranks.
        seed: seed of its random stream, None if it has none.
        tokens: tokens of its prompt, and the most tokens in all.
        endings: criteria checked by the caller: stop strings (they need a tokenizer) and its time limit (ranks
            have clocks of their own).
        objects: mutable parts of its processors and criteria, None if there are none.
        adapters: its adapters, None if the model has none.
    """

    kwargs: dict[str, Any]
    seed: int | None
    tokens: tuple[int, int]
    endings: StoppingCriteriaList
    objects: ObjectState | None
    adapters: ActiveAdapters | None = None

    @property
    def prompt(self) -> torch.Tensor:
        return self.kwargs["input_ids"]

    def follow(self, ids: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, bool]:
        """Add new tokens, up to the one that ends the call.

        Args:
            ids: prompt and tokens so far, `[1, tokens]`.

        Returns:
            The same with the new ones, and whether one of them ends it.
        """
        for token in tokens:
            ids = torch.cat((ids, ids.new_tensor([[token]])), -1)
            if self.endings and bool(self.endings(ids, None)[0]):
                return ids, True
        return ids, False

    def restore(self, states: dict[int, Any]) -> None:
        """Write new states of the caller's objects to them."""
        if self.objects is not None:
            self.objects.restore(states)


def shared_call(
    model: Any, arguments: Mapping[str, Any], seed: int | None, draw_seed: Callable[[], int] | None = None
) -> SharedCall | str:
    """Return a call whose row may join others; else why it runs alone.

    Args:
        model: the caller's; its settings hold where the call says nothing.
        arguments: arguments of `generate` by name.
        seed: seed of the call's random stream.
        draw_seed: draws a seed for a sampling call without one. None if such a call runs alone: then it
            draws from the caller's generator, as in one process.
    """
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
        if setting(name) is True or setting(name) not in (None, False, 1):  # True is 1, but not for a number of beams
            return f"it has {name}"
    caches = model.generation_config.use_cache is not False
    if setting("use_cache") is (not caches):
        return "it uses no cache" if caches else "it uses a cache, and others do not"
    if setting("do_sample") and seed is None and draw_seed is None:
        return "it samples without a seed"
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    words = model.config.get_text_config().vocab_size
    if (
        type(ids) is not torch.Tensor
        or ids.dtype != torch.long
        or ids.ndim != 2
        or ids.shape[0] != 1
        or not ids.numel()
    ):
        return "it is not one prompt of token ids"
    if mask is not None and (mask.shape != ids.shape or not bool(mask[0, -1])):
        return "its mask is not one of a prompt"
    if mask is None and int(ids[0, -1]) == setting("pad_token_id"):
        return "its prompt ends with padding"  # whose position transformers counts otherwise
    if int(ids.min()) < 0 or int(ids.max()) >= words:
        return "an id is out of range"  # for which all rows of a batch would fail
    tokenizer, endings = kwargs.pop("tokenizer", None), StoppingCriteriaList()
    if stop_strings := setting("stop_strings"):
        if tokenizer is None:
            return "it has stop strings and no tokenizer"  # which is an error of transformers
        endings.append(StopStringCriteria(tokenizer, stop_strings))
        kwargs["stop_strings"] = None
    if seconds := setting("max_time"):
        endings.append(MaxTimeCriteria(seconds))
        kwargs["max_time"] = None
    if setting("do_sample") and seed is None and draw_seed is not None:
        seed = draw_seed()
    objects = ObjectState(stateful_arguments(kwargs))
    return SharedCall(kwargs, seed, tokens_of(model, arguments), endings, objects if objects.parts else None)


def tokens_of(model: Any, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many tokens the prompts of a call of `generate` have, and with all that may follow.

    Args:
        model: the caller's; its settings hold where the call says nothing.
        arguments: arguments of `generate` by name.
    """
    config = arguments.get("generation_config") or model.generation_config
    prompts = [arguments.get(name) for name in ("input_ids", "inputs", "inputs_embeds")]
    before = max((each.shape[1] for each in prompts if isinstance(each, torch.Tensor) and each.ndim > 1), default=1)
    new, longest = (arguments.get(name, getattr(config, name, None)) for name in ("max_new_tokens", "max_length"))
    if new is None:
        new = _NEW_TOKENS if longest is None else max(longest - before, 1)
    return before, before + new
