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
from parallelformers_ng.batching.whole_rows import runs_whole
from parallelformers_ng.errors import BatchingError
from parallelformers_ng.generation.in_place_cache import expect
from parallelformers_ng.kernels.decoder_stack import MAX_STEPS
from parallelformers_ng.kernels.joint_pass import JointPass, PromptStep

_WORTH_A_PASS = 128
"""Number of prompt tokens that run in the fixed time of a forward pass. Prompts share a pass if that adds fewer tokens:
padding, or cached tokens that run again."""
_WORTH_A_STEP = 8
"""Number of prompt tokens that run in the time of the Python code of one more step in a joint pass."""
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


@dataclass(eq=False)
class _Chunk:
    """Tokens of prompts that one step of the model runs: some tokens of one prompt, or all of several prompts."""

    rows: list[BatchRow]
    begin: int  # first column (token position) of the step
    end: int  # column after the last one; shorter prompts have padding up to it

    @property
    def tokens(self) -> int:
        return len(self.rows) * (self.end - self.begin)

    @property
    def lengths(self) -> list[int]:
        return [row.ids.shape[1] for row in self.rows]

    @property
    def is_last(self) -> bool:
        return self.end == max(self.lengths)

    @property
    def mask(self) -> torch.Tensor | None:
        """Mask of the prompt up to the last column of the step; None for several prompts."""
        return self.rows[0].prompt_mask[:, : self.end] if len(self.rows) == 1 else None


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
        chunks = self._chunks(most, MAX_STEPS - (beside is not None) if fits else 1)
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

    def _chunks(self, most: int, max_steps: int) -> list[_Chunk]:
        """Divide the waiting prompts into the steps of the next pass. Only the last step may leave a prompt
        unfinished."""
        chunks, waiting, is_joint = list[_Chunk](), [*self._waiting], max_steps > 1
        while waiting and (not chunks or (len(chunks) < max_steps and chunks[-1].is_last and most >= _WORTH_A_STEP)):
            chunks.append(self._chunk(waiting, 0 if chunks else self._done, most, is_joint))
            del waiting[: len(chunks[-1].rows)]
            most -= chunks[-1].tokens
        return chunks

    def _chunk(self, waiting: list[BatchRow], done: int, most: int, is_joint: bool) -> _Chunk:
        """Choose the next step of a pass among the `waiting` prompts; `done` tokens of the first prompt have run."""
        if done:
            rows, begin = [waiting[0]], done
        else:
            rows, begin = self._side_by_side(waiting, most, is_joint)
            if begin:
                self._prefixes.fill(rows[0].cache, [row.ids for row in rows], begin)
        end = max(row.ids.shape[1] for row in rows)
        left = end - begin
        if not 0 < most < left * len(rows) or rows[0].call.config.use_cache is False:
            return _Chunk(rows, begin, end)
        # A single prompt is too long for the pass. It runs in equal chunks, because a short chunk would read all
        # weights, too. If the next prompt can fill the last chunk, the chunks are as long as possible.
        expect(row_caches.layers_of(rows[0].cache), end)
        fills = is_joint and len(self._waiting) > 1
        return _Chunk(rows, begin, begin + (most if fills else math.ceil(left / math.ceil(left / most))))

    def _side_by_side(self, waiting: list[BatchRow], most: int, is_joint: bool) -> tuple[list[BatchRow], int]:
        """Choose the first waiting prompts that can run in one step. Return them, and the number of first tokens of
        each that are in the prefix cache and need not run again."""
        again = _WORTH_A_STEP if is_joint else _WORTH_A_PASS
        rows, known, lengths, kept = list[BatchRow](), list[int](), list[int](), 0
        for row in waiting:
            length, tokens = row.ids.shape[1], self._kept(row)
            longest, common = max([*lengths, length]), min([*known, tokens])
            fits = _fits_beside(row, longest) and max([*known, tokens]) - common < again
            fits_padded = not is_joint or longest - min([*lengths, length]) < again
            if rows and (not (fits and fits_padded) or (longest - common) * (len(rows) + 1) > most):
                break
            rows, known, lengths, kept = [*rows, row], [*known, tokens], [*lengths, length], common
            if not fits:
                break
        return rows, kept

    def _kept(self, row: BatchRow) -> int:
        reuses = self.is_causal and row.cache is not None and row.prompt_is_plain and row_caches.keeps_all(row.cache)
        return self._prefixes.length(row.ids) if reuses else 0

    def _step(self, chunk: _Chunk) -> PromptStep:
        """Return the step that runs a chunk. All its prompts use the model arguments of the first prompt."""
        row, begin, end, mask = chunk.rows[0], chunk.begin, chunk.end, chunk.mask
        ids = torch.cat([pad(each.ids[:, :end], (0, end - min(end, each.ids.shape[1]))) for each in chunk.rows])
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
        row = chunk.rows[0]
        output = self._model(**inputs, return_dict=True)
        if row.cache is None and (name := row_caches.name_in(output)):
            row.call.model_kwargs[name] = output[name]  # the model makes its own cache
        if name := next((name for name in _OF_THEIR_OWN if output.get(name) is not None), ""):
            raise BatchingError(f"rows cannot be added to the cache {name} of this model")
        logits: torch.Tensor = output.logits
        if len(chunk.rows) == 1:
            return logits[:, -1]
        columns = sorted(set(last)) if logits.shape[1] < chunk.end - chunk.begin else range(logits.shape[1])
        return logits[range(len(logits)), [columns.index(column) for column in last]]

    def _finish(self, chunk: _Chunk, logits: torch.Tensor) -> PrefillOutput:
        for _ in chunk.rows:
            self._waiting.popleft()
        rows, cache = chunk.rows, chunk.rows[0].cache
        if len(rows) == 1 and (cache is None or not row_caches.holds_any(cache)) and runs_whole(self._model, rows[0]):
            cache = None
        if chunk.mask is not None:
            return PrefillOutput(rows, logits, cache, chunk.mask)
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


def _fits_beside(row: BatchRow, longest: int) -> bool:
    """Return whether a prompt may run in one step with other prompts, of which the longest has `longest` tokens.

    The prompt must have no padding, and its cache must keep the keys and values of all tokens.
    """
    if row.cache is None:
        return False
    windows = [getattr(layer, "sliding_window", None) or longest + 1 for layer in row.cache.layers]
    return min(windows) > longest and row_caches.is_of_tokens_alone(row.cache) and row.prompt_is_plain
