"""A call of `generate`, taken as far as its loop: transformers checks and prepares it, and a batch goes on with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from parallelformers_ng.batching.penalties import Penalties


@dataclass
class Prepared:
    """The arguments that `generate` hands to its loop.

    Attributes:
        input_ids: the prompt, int64 `[1, tokens]`.
        processors, criteria: objects of this call alone; they see its row as a batch of one.
        penalties: penalties among its processors, which a batch applies for all rows at once; None if it has none.
        config: its settings, with what the model's own say.
        model_kwargs: further arguments of the model: attention mask, positions, cache.
    """

    input_ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    penalties: Penalties | None = None

    def __post_init__(self) -> None:
        self.penalties = next((each for each in self.processors if isinstance(each, Penalties)), None)
        self.processors = LogitsProcessorList(each for each in self.processors if each is not self.penalties)


def inputs_of(model: Any, ids: torch.Tensor, positions: torch.Tensor, **arguments: Any) -> dict[str, Any]:
    """Return the model's arguments for new tokens, as `generate` makes them.

    Args:
        ids, positions: int64 `[rows, tokens]`. Some models leave it to their forward to take positions from the length
            of the cache, padding counted; here they have those of the rows.
        arguments: arguments of `prepare_inputs_for_generation`.
    """
    inputs = model.prepare_inputs_for_generation(ids, position_ids=positions, **arguments)
    if "position_ids" in inputs and inputs["position_ids"] is None:
        inputs["position_ids"] = positions
    return inputs


def prepare(model: Any, kwargs: dict[str, Any]) -> Prepared:
    """Have `model.generate(**kwargs)` prepare itself, and stop before the first forward.

    Raises what `generate` raises of arguments that it refuses.
    """
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
