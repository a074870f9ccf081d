"""Prepares a call of `generate` for a batch: transformers checks the arguments, and the batch runs the decode steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from parallelformers_ng.batching.penalties import Penalties


@dataclass
class Prepared:
    """The arguments that `generate` passes to its decoding loop."""

    input_ids: torch.Tensor  # token ids of the prompt, int64 `[1, tokens]`
    # Logits processors of this call except `penalties`; a processor gets tensors of one row.
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList  # stopping criteria of this call; a criterion gets tensors of one row
    config: GenerationConfig  # settings of the call, with defaults from the model's `generation_config`
    model_kwargs: dict[str, Any]  # further arguments of the model: attention mask, positions, cache
    # Penalties of the call, which a batch applies to all rows at once; None if the call has no penalties.
    penalties: Penalties | None = None

    def __post_init__(self) -> None:
        self.penalties = next((each for each in self.processors if isinstance(each, Penalties)), None)
        self.processors = LogitsProcessorList(each for each in self.processors if each is not self.penalties)


def inputs_of(model: Any, ids: torch.Tensor, positions: torch.Tensor, **arguments: Any) -> dict[str, Any]:
    """Return the model's arguments for new tokens, as `generate` would make them. They include the positions, because
    some models would otherwise count from the length of the cache, padding included."""
    inputs = model.prepare_inputs_for_generation(ids, position_ids=positions, **arguments)
    if "position_ids" in inputs and inputs["position_ids"] is None:
        inputs["position_ids"] = positions
    return inputs


def prepare(model: Any, kwargs: dict[str, Any]) -> Prepared:
    """Run `model.generate(**kwargs)` up to its first forward pass, and return the arguments of its decoding loop."""
    prepared_calls: list[Prepared] = []

    def take(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        model_kwargs.pop("synced_gpus", None)
        model_kwargs.pop("streamer", None)
        prepared_calls.append(Prepared(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs))
        return input_ids

    model.generate(**kwargs, custom_generate=take)
    return prepared_calls.pop()
