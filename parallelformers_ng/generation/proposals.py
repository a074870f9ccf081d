"""Proposes tokens for greedy `generate(prompt_lookup_num_tokens=…)` and `generate(assistant_model=…)`. The model checks
every proposal, so proposals change the speed of a generation, and not its tokens.

In both ways to propose, the first pass has the prompt alone, as without proposals. With proposals the pass would be
longer, and sums of torch over a long pass depend on its length: in bf16 the first tokens could differ.

The proposals of prompt lookup differ from those of transformers in two more ways:

- They follow the latest occurrence of the last tokens, not the first one. Models repeat recent text more often.
- Logits processors do not run for each proposal, but only for the model's own logits.

On CPU, the proposals of an assistant come from a loop of this module after the first round. With the assistant's
`generate`, a round takes 3 ms longer, a quarter of an assistant's step of 135M parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    PromptLookupCandidateGenerator,
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)

from parallelformers_ng.generation.wrapping import wrap_once
from parallelformers_ng.sharding.cache_names import CACHE


def propose_after_prompt() -> None:
    """Patch `generate`: greedy decoding runs the prompt without proposals, then proposes at lower cost. Idempotent."""
    wrap_once(GenerationMixin, "_get_candidate_generator", _after_prompt)


def _after_prompt(usual: Callable[..., Any]) -> Callable[..., Any]:
    def get(model: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        generator = usual(model, generation_config, *args, **kwargs)
        if generation_config.do_sample:
            return generator  # with sampling, other proposals would change the tokens of a seed
        if type(generator) is AssistedCandidateGenerator:
            _begin_with_prompt(generator)
            if _is_plain(generator) and generation_config.assistant_ensemble_weight is None:
                _propose_in_a_plain_loop(generator)
        return LatestMatch(generator) if type(generator) is PromptLookupCandidateGenerator else generator

    return get


def _begin_with_prompt(generator: AssistedCandidateGenerator) -> None:
    def begin(input_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
        generator.get_candidates, generator.update_candidate_strategy = go_on, learn_nothing
        return input_ids, None

    def learn_nothing(*_: Any) -> None:
        del generator.update_candidate_strategy  # the next passes call the class's method

    def go_on(input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        del generator.get_candidates
        length, has_encoder = input_ids.shape[-1], generator.assistant_model.config.is_encoder_decoder
        _prepare_attention_mask(generator.assistant_kwargs, length, has_encoder)  # changes `assistant_kwargs` in place
        _prepare_position_ids(generator.assistant_kwargs, length, has_encoder)
        _prepare_token_type_ids(generator.assistant_kwargs, length)
        return generator.get_candidates(input_ids, **kwargs)

    generator.get_candidates = begin


def _is_plain(generator: AssistedCandidateGenerator) -> bool:
    assistant = generator.assistant_model
    is_stock = all(
        getattr(type(assistant), name) is getattr(GenerationMixin, name) for name in ("generate", "_sample", "_prefill")
    )
    inputs = {"encoder_outputs", "mm_encoder_outputs"} & generator.assistant_kwargs.keys()
    return is_stock and not inputs and not assistant.config.is_encoder_decoder and assistant.device.type == "cpu"


def _propose_in_a_plain_loop(generator: AssistedCandidateGenerator) -> None:
    """Make a generator run the assistant in a plain loop of forward passes. The first round still calls the assistant's
    `generate`, which creates the KV cache.

    All ranks choose the same proposals, because all ranks have the same logits on CPU.
    """
    assistant: Any = generator.assistant_model
    generate, settings = generator._generate_candidates, generator.generation_config
    ids_of_ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    ends = [token for token in ids_of_ends if token is not None]

    def propose(arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        kwargs = dict(generator.assistant_kwargs)
        if kwargs.get(CACHE) is None:
            return generate(arguments)
        ids, count = arguments["input_ids"], arguments["max_new_tokens"]
        for place in range(count):
            inputs = assistant.prepare_inputs_for_generation(
                ids, next_sequence_length=ids.shape[1] - kwargs[CACHE].get_seq_length(), **kwargs
            )
            output = assistant(**inputs, return_dict=True)
            kwargs = assistant._update_model_kwargs_for_generation(output, kwargs)
            # A copy, because logits processors may write to it.
            scores = output.logits[:, -1].to(torch.float32, copy=True)
            for processor in arguments["logits_processor"]:
                scores = processor(ids, scores)
            if place < arguments["min_new_tokens"]:
                scores[:, ends] = -torch.inf
            token = int(scores.numpy().argmax())  # ten times as fast as `Tensor.argmax`
            ids = torch.cat((ids, ids.new_tensor([[token]])), dim=1)
            if token in ends or not _is_sure(generator, scores[0], token):
                break
        return ids, None

    generator._generate_candidates = propose


def _is_sure(generator: AssistedCandidateGenerator, scores: Tensor, token: int) -> bool:
    # Stop proposing at the same probability as `ConfidenceCriteria` of transformers.
    threshold = generator.generation_config.assistant_confidence_threshold
    if not threshold:
        return True
    probability = float(scores.softmax(-1)[token])
    if hasattr(generator, "probs"):
        generator.probs.append(probability)  # with scikit-learn, the generator adapts its threshold to these
    return probability >= threshold


class LatestMatch(PromptLookupCandidateGenerator):
    """Prompt lookup that proposes the tokens after the latest earlier occurrence of the newest tokens."""

    def __init__(self, usual: PromptLookupCandidateGenerator) -> None:
        self.__dict__.update(usual.__dict__)
        self._has_begun = False

    def get_candidates(self, input_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return the tokens and their proposals, `[1, tokens + proposals]`, and None: proposals have no logits."""
        if not self._has_begun:
            self._has_begun = True
            return input_ids, None
        # Leave room below `max_length` for the token that the model itself adds after the proposals.
        most = min(self.num_output_tokens, self.max_length - input_ids.shape[1] - 1)
        proposals = self._after_match(input_ids[0])[: max(most, 0)]
        if self.eos_token_id is not None:
            ends = torch.isin(proposals, self.eos_token_id).nonzero()
            proposals = proposals[: ends[0].item()] if len(ends) else proposals
        return torch.cat((input_ids, proposals[None]), dim=1), None

    def _after_match(self, ids: Tensor) -> Tensor:
        """Return all tokens after the latest earlier occurrence of the last tokens of `ids`; none without a match."""
        for size in range(min(self.max_matching_ngram_size, len(ids) - 1), 0, -1):
            windows = ids[:-1].unfold(0, size, 1)
            matches = (windows == ids[-size:]).all(dim=1).nonzero()
            if len(matches):
                return ids[int(matches[-1]) + size :]
        return ids[:0]
