"""Proposes tokens for greedy `generate(prompt_lookup_num_tokens=…)`. The model checks every proposal, so proposals
change the speed of a generation, and not its tokens.

The proposals differ from those of transformers in three ways:

- They follow the latest occurrence of the last tokens, not the first one. Models repeat recent text more often.
- The first pass has the prompt alone, as without prompt lookup. With proposals, the pass is longer, and sums of torch
  over a long pass depend on its length: in bf16 the first tokens could differ from those without prompt lookup.
- Logits processors do not run for each proposal, but only for the model's own logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator


def propose_latest_matches() -> None:
    """Make greedy generations of this process use `LatestMatch` for prompt lookup, from now on. Idempotent."""
    if not hasattr(GenerationMixin._get_candidate_generator, "__wrapped__"):
        GenerationMixin._get_candidate_generator = _latest(GenerationMixin._get_candidate_generator)


def _latest(usual: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(usual)
    def get(model: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        generator = usual(model, generation_config, *args, **kwargs)
        # Sampling draws numbers for proposals too: other proposals would change the tokens of a seed.
        is_greedy = type(generator) is PromptLookupCandidateGenerator and not generation_config.do_sample
        return LatestMatch(generator) if is_greedy else generator

    return get


class LatestMatch(PromptLookupCandidateGenerator):
    """A generator that proposes the tokens after the latest occurrence of the last tokens.

    Args:
        usual: generator of transformers with the settings.
    """

    def __init__(self, usual: PromptLookupCandidateGenerator) -> None:
        self.__dict__.update(usual.__dict__)
        self._has_begun = False

    def get_candidates(self, input_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return the tokens with proposals, `[1, tokens + proposals]`, and None, because proposals have no logits."""
        if not self._has_begun:
            self._has_begun = True
            return input_ids, None
        # The model adds a token of its own to the proposals.
        most = min(self.num_output_tokens, self.max_length - input_ids.shape[1] - 1)
        proposals = self._after_match(input_ids[0])[: max(most, 0)]
        if self.eos_token_id is not None:
            ends = torch.isin(proposals, self.eos_token_id).nonzero()
            proposals = proposals[: ends[0].item()] if len(ends) else proposals
        return torch.cat((input_ids, proposals[None]), dim=1), None

    def _after_match(self, ids: Tensor) -> Tensor:
        """Return all tokens after the latest occurrence of the last tokens of `ids`; no tokens without a match."""
        for size in range(min(self.max_matching_ngram_size, len(ids) - 1), 0, -1):
            windows = ids[:-1].unfold(0, size, 1)
            matches = (windows == ids[-size:]).all(dim=1).nonzero()
            if len(matches):
                return ids[int(matches[-1]) + size :]
        return ids[:0]
