"""Runs the prompts of a batch: short prompts together, a long prompt in chunks, so that no row waits long."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from parallelformers_ng.batching import row_caches
from parallelformers_ng.batching.prefix_cache import PrefixCache
from parallelformers_ng.batching.prepared import inputs_of
from parallelformers_ng.batching.row import BatchRow
from parallelformers_ng.batching.scheduler import Chunk, chunks_of
from parallelformers_ng.batching.whole_rows import runs_whole
from parallelformers_ng.errors import BatchingError
from parallelformers_ng.generation.in_place_cache import expect
from parallelformers_ng.kernels.decoder_stack import MAX_STEPS
from parallelformers_ng.kernels.joint_pass import JointPass, PromptStep

_OF_ONE_PROMPT = ("attention_mask", "position_ids", "cache_position")
_OF_THEIR_OWN = ("mems", "past_buckets_states")
"""XLNet and Reformer: their caches depend on the length of the sequence."""


@dataclass(eq=False)
class PrefillOutput:
    """The results of prompts that ran together."""

    rows: list[BatchRow]
    logits: torch.Tensor  # logits of each prompt's last token, `[rows, vocabulary]`
    cache: Any  # cache of the prompts; None if the model runs whole sequences at every step
    # Mask of the cache, `[rows, columns]`: 0 for padding, 1 for tokens. The data type is int64, or for one row that
    # of `BatchRow.prompt_mask`.
    mask: torch.Tensor


def rows_of(results: list[PrefillOutput]) -> list[BatchRow]:
    return [row for prefill in results for row in prefill.rows]


class _WaitingRow:
    """A row whose prompt waits, with the facts that decide with which other prompts it runs (`WaitingPrompt`)."""

    def __init__(self, row: BatchRow, prefixes: PrefixCache, is_causal: bool) -> None:
        self.row, self.length = row, row.ids.shape[1]
        self.may_be_cut = row.call.config.use_cache is not False
        self._prefixes, self._is_causal = prefixes, is_causal

    @functools.cached_property
    def cached(self) -> int:
        row = self.row
        reuses = self._is_causal and row.cache is not None and row.prompt_is_plain and row_caches.keeps_all(row.cache)
        return self._prefixes.length(row.ids) if reuses else 0

    @functools.cached_property
    def max_beside(self) -> float:
        """A prompt with padding, or with states beside its keys and values, runs alone. In a window that is shorter
        than a step, padding would displace tokens."""
        row = self.row
        if row.cache is None:
            return 0
        windows = [getattr(layer, "sliding_window", None) or math.inf for layer in row.cache.layers]
        is_plain = row_caches.is_of_tokens_alone(row.cache) and row.prompt_is_plain
        return min(windows) - 1 if is_plain else 0


_Chunk = Chunk[_WaitingRow]


def _rows_of(chunk: _Chunk) -> list[BatchRow]:
    return [prompt.row for prompt in chunk.prompts]


def _mask_of(chunk: _Chunk) -> torch.Tensor | None:
    """Mask of a single prompt up to the last column of the step; None for several prompts."""
    return chunk.prompts[0].row.prompt_mask[:, : chunk.end] if len(chunk.prompts) == 1 else None


class Prompts:
    """The waiting prompts, in the order of their arrival.

    Attributes:
        latest: number of tokens in the latest pass, padding included.
        latest_begin: first column that the latest pass ran of its last prompt.
        ran_beside: whether the latest pass has called the argument `beside` of `run`.
        is_causal: whether tokens see no later tokens. If not, each prompt runs whole, alone, and not from the cache.
    """

    def __init__(self, model: Any, prefixes: PrefixCache) -> None:
        self.latest, self.latest_begin, self.ran_beside = 0, 0, False
        self.is_causal = is_causal(model)
        self._model = model
        self._prefixes = prefixes
        self._waiting: deque[BatchRow] = deque()
        self._done = 0  # number of tokens of the first prompt that have run

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[BatchRow]:
        return iter(self._waiting)

    def add(self, row: BatchRow) -> None:
        self._waiting.append(row)

    def leave(self, numbers: Collection[int]) -> None:
        if self._waiting and self._waiting[0].number in numbers:
            self._done = 0
        self._waiting = deque(row for row in self._waiting if row.number not in numbers)

    def run(self, most: int, beside: Callable[[], object] | None = None) -> list[PrefillOutput]:
        """Run up to `most` tokens of the waiting prompts in one pass, and return the outputs of completed prompts.

        ::

            passes of 6 tokens:   a a a a a a | a a b b b b | b b b c c d

        Tokens in the prefix cache do not run again. If C does not compute the layers, a pass runs a chunk of one
        prompt, or several whole prompts. If `most` is 0, the first prompt runs whole. `beside` runs a decode step,
        which may share the pass.
        """
        most = most if self.is_causal else 0
        joint = JointPass.of(self._model)
        fits = joint is not None and 0 < most <= joint.max_tokens
        prompts = [_WaitingRow(row, self._prefixes, self.is_causal) for row in self._waiting]
        chunks = chunks_of(prompts, self._done, most, MAX_STEPS - (beside is not None) if fits else 1)
        for number, chunk in enumerate(chunks):
            self._begin(chunk, is_new=number > 0 or not self._done)
        self.latest, self.latest_begin = sum(chunk.tokens for chunk in chunks), chunks[-1].begin
        steps = [self._step(chunk) for chunk in chunks]
        self.ran_beside = False

        def run_beside() -> None:
            self.ran_beside = True
            if beside is not None:
                beside()

        are_several = beside is not None or len(steps) > 1
        logits = joint.run(steps, beside and run_beside) if joint is not None and are_several else []
        logits += [step.run() for step in steps[len(logits) :]]
        self._done = 0 if chunks[-1].is_last else chunks[-1].end
        return [self._finish(*each) for each in zip(chunks, logits, strict=True) if each[0].is_last]

    def _begin(self, chunk: _Chunk, is_new: bool) -> None:
        """Make the caches of a chunk ready: with kept keys and values, and with room for the whole prompt."""
        rows = _rows_of(chunk)
        if is_new and chunk.begin:
            self._prefixes.fill(rows[0].cache, [row.ids for row in rows], chunk.begin)
        if not chunk.is_last:
            expect(row_caches.layers_of(rows[0].cache), chunk.length)

    def _step(self, chunk: _Chunk) -> PromptStep:
        """Return the step that runs a chunk. All its prompts use the model arguments of the first prompt."""
        rows, begin, end, mask = _rows_of(chunk), chunk.begin, chunk.end, _mask_of(chunk)
        row = rows[0]
        ids = torch.cat([pad(each.ids[:, :end], (0, end - min(end, each.ids.shape[1]))) for each in rows])
        positions = ((torch.ones_like(ids[:1]) if mask is None else mask).cumsum(-1) - 1).clamp(min=0)
        arguments = {name: value for name, value in row.call.model_kwargs.items() if name not in _OF_ONE_PROMPT}
        last = [length - 1 - begin for length in chunk.lengths] if chunk.is_last else []
        if "logits_to_keep" in arguments and len(ids) > 1:
            arguments["logits_to_keep"] = ids.new_tensor(sorted(set(last)))
        inputs = inputs_of(
            self._model,
            ids,
            positions[:, begin:].expand(len(ids), -1),
            next_sequence_length=end - begin,
            attention_mask=mask,
            is_first_iteration=begin == 0,
            **arguments,
        )
        return PromptStep(functools.partial(self._run_model, chunk, inputs, last), last)

    def _run_model(self, chunk: _Chunk, inputs: dict[str, Any], last: list[int]) -> torch.Tensor:
        row = chunk.prompts[0].row
        output = self._model(**inputs, return_dict=True)
        if row.cache is None and (name := row_caches.name_in(output)):
            row.call.model_kwargs[name] = output[name]  # the model makes its own cache
        if name := next((name for name in _OF_THEIR_OWN if output.get(name) is not None), ""):
            raise BatchingError(f"rows cannot be added to the cache {name} of this model")
        logits: torch.Tensor = output.logits
        if len(chunk.prompts) == 1:
            return logits[:, -1]
        columns = sorted(set(last)) if logits.shape[1] < chunk.end - chunk.begin else range(logits.shape[1])
        return logits[range(len(logits)), [columns.index(column) for column in last]]

    def _finish(self, chunk: _Chunk, logits: torch.Tensor) -> PrefillOutput:
        rows = _rows_of(chunk)
        for _ in rows:
            self._waiting.popleft()
        cache = rows[0].cache
        if len(rows) == 1 and (cache is None or not row_caches.holds_any(cache)) and runs_whole(self._model, rows[0]):
            cache = None
        if (mask := _mask_of(chunk)) is not None:
            return PrefillOutput(rows, logits, cache, mask)
        empty = [chunk.end - length for length in chunk.lengths]
        row_caches.align_ends(cache, empty)
        mask = torch.ones((len(rows), chunk.end), dtype=torch.long, device=logits.device)
        for index, columns in enumerate(empty):
            mask[index, :columns] = 0
        return PrefillOutput(rows, logits, cache, mask)


def is_causal(model: Any) -> bool:
    """Whether the configuration and all attention modules of a model say that its attention is causal."""
    attentions = (module for module in model.modules() if getattr(module, "layer_idx", None) is not None)
    return all(getattr(each, "is_causal", True) for each in (model.config.get_text_config(), *attentions))
