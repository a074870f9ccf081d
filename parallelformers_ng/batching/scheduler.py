"""Decides everything about a batch: which calls join, how many prompt tokens and steps a round has, and which prompts
share a step of the model.

The other files carry the decisions out: `batch.py` in the caller, `rounds.py` and `prompts.py` on the ranks. Nothing
here runs a model or knows of processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from parallelformers_ng.batching.round_messages import RoundOutput, Schedule
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.sharding.active_adapters import ActiveAdapters

_LONGEST_PAUSE = 0.005
_FEW_PASSES = 4
"""Rows whose callers wait for whole answers wait for so many widest passes of prompts."""
_MAX_OVERTAKEN = 16
"""A waiting call that later calls of a higher priority have overtaken in so many rounds goes first."""
_LAYERS_PER_PADDED = 4
"""Memory of the caches of all layers, as a multiple of the most memory of a copy of one layer with padding."""
_WORTH_A_PASS = 128
"""Number of prompt tokens that run in the fixed time of a forward pass. Prompts share a pass if that adds fewer tokens:
padding, or cached tokens that run again."""
_WORTH_A_STEP = 8
"""Number of prompt tokens that run in the time of the Python code of one more step in a joint pass."""
_ROUND_SECONDS = 0.02
"""Target seconds of a round with short steps; a new call waits at most one round. Sending a round takes 0.2 ms."""
_MIN_SECONDS = 1e-6  # avoids a division by 0 if a test freezes the clock
_MAX_STEPS = 8
_MIN_CHUNK, _FIRST_CHUNK = 8, 128
"""Prompt tokens in a round: the minimum, and the number before the speed is known."""
_SHARE_OF_PATIENCE = 0.8
"""Share of the patience that the prompt tokens of a round should take: a round may be slower than expected."""
_FIXED_SHARE = 0.5
"""Fixed time of a pass over prompts, beside its time per token, as a share of a decode step's time. Both read all
weights; a pass also computes. Measured: 0.3 to 0.75 (two CPU ranks, 600M, bf16, step of 60 ms, 64 to 256 tokens)."""
_WIDEST_CHUNK = {"cpu": 1024, "cuda": 4096}
"""Most prompt tokens in a round, for each kind of device. A round in which no row waits for its next token uses this
maximum, which bounds the memory of the forward pass."""


class ScheduledCall(Protocol):
    """A call that waits for a row, or has one (`Ticket`)."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""

    @property
    def tokens_needed(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def adapters(self) -> ActiveAdapters | None:
        """Active adapters of the call. Rows of a batch have the same adapters."""

    @property
    def priority(self) -> int:
        """Calls with a lower number go first, as in vLLM."""

    @property
    def decodes(self) -> bool:
        """Whether the prompt has run, so that the row waits for its next token."""

    @property
    def streams(self) -> bool:
        """Whether the caller reads each token when it comes, not only the whole answer."""

    @property
    def is_suspect(self) -> bool:
        """Whether the call must not share a round with another suspect."""

    @property
    def needs_solitude(self) -> bool:
        """Whether the call must not share a round with any other call."""


class Scheduler:
    """Decides what the ranks run in each round of a batch.

    Attributes:
        room: most tokens in the caches of all rows, padding included. Without a limit of the caller, it is infinite
            until a round has measured the free memory.
        pads: whether every row takes the memory of the longest row.
        budget: sizes of a round, adapted to the measured speed.
    """

    def __init__(self, options: BatchingOptions, device: str) -> None:
        self.room, self.pads = options.cache_tokens or math.inf, True
        self.budget = TokenBudget(options.prefill_patience / 1000, device)
        self._max_rows = options.rows
        self._tokens_before = 0  # prompt tokens that have run while rows waited for their next token
        self._overtaken = Counter[int]()  # number of a waiting call → rounds in which later calls got rows before it

    def next_round(
        self, waiting: Mapping[int, ScheduledCall], running: Mapping[int, ScheduledCall], in_chunks: bool
    ) -> Schedule:
        """Decide about the next round. The numbers of the calls are in the order of their arrival.

        `in_chunks` says whether prompts may share passes and run in chunks.
        """
        admitted = self._admitted(waiting, [*running.values()])
        calls = [*running.values(), *(waiting[number] for number in admitted)]
        # Callers that wait for whole answers get them earlier if a few prompts run before the next step, because the
        # steps then serve more rows.
        prompt_tokens = sum(call.prompt_tokens for call in calls if not call.decodes)
        are_few = prompt_tokens + self._tokens_before <= _FEW_PASSES * self.budget.widest
        steps_first = any(call.decodes and (call.streams or not are_few) for call in calls)
        # The count goes on until no prompt is left, so that prompts that come one after another are few together.
        if not prompt_tokens:
            self._tokens_before = 0
        elif not steps_first and any(call.decodes for call in calls):
            self._tokens_before += min(prompt_tokens, self.budget.widest)
        chunk, widest = (self.budget.chunk, self.budget.widest) if in_chunks else (0, 0)
        return Schedule(
            admitted=admitted,
            max_tokens=chunk if steps_first else widest,
            late_tokens=widest if steps_first else 0,
            steps=self.budget.steps,
            # At most one, because more rows will share the later steps.
            steps_between_prompts=int(steps_first),
            chunk=chunk,
        )

    def _admitted(self, waiting: Mapping[int, ScheduledCall], rows: list[ScheduledCall]) -> tuple[int, ...]:
        """Choose the calls that get a row. If the first waiting call does not fit, no later call overtakes it."""
        admitted = list[int]()
        for number in self._in_order(waiting) if len(rows) < self._max_rows else ():
            call = waiting[number]
            needed = [row.tokens_needed for row in (*rows, call)]
            padded = max(needed) * len(needed)
            # Without padding in the caches, torch's attention may still pad the keys and values of one layer.
            size = padded if self.pads else max(sum(needed), padded // _LAYERS_PER_PADDED)
            is_full = len(rows) >= self._max_rows or (rows and size > self.room)
            is_alone = any(row.needs_solitude or row.adapters != call.adapters for row in rows)
            is_suspected = call.is_suspect and any(row.is_suspect for row in rows)
            if is_full or is_alone or is_suspected or (rows and call.needs_solitude):
                break
            admitted.append(number)
            rows = [*rows, call]
        if admitted:
            latest = max(admitted)
            left = waiting.keys() - {*admitted}
            self._overtaken = Counter({number: self._overtaken[number] + (number < latest) for number in left})
        return tuple(admitted)

    def _in_order(self, waiting: Mapping[int, ScheduledCall]) -> list[int]:
        """Return the numbers of the waiting calls by priority, then by arrival. No call starves (`_MAX_OVERTAKEN`)."""
        starving = [number for number in waiting if self._overtaken[number] >= _MAX_OVERTAKEN]
        others = [number for number in waiting if self._overtaken[number] < _MAX_OVERTAKEN]
        return [*starving, *sorted(others, key=lambda number: (waiting[number].priority, number))]

    def learn_room(self, outputs: Sequence[RoundOutput], host_bytes: Callable[[], int]) -> None:
        """Note whether rows are padded. Once, if the caller has set no limit, set `room` to the tokens that fit in half
        of the free memory."""
        if not all(output.token_bytes for output in outputs):
            return
        self.pads = any(output.pads for output in outputs)
        if self.room is not math.inf:
            return
        device_tokens = [output.free_bytes // 2 // output.token_bytes for output in outputs if output.free_bytes]
        host_tokens = host_bytes() // 2 // sum(output.token_bytes for output in outputs)
        self.room = min(device_tokens, default=host_tokens)


class TokenBudget:
    """The sizes of the next round.

    Args:
        patience: longest time that rows may wait for a pass of prompts, beside the time of a step, in seconds.
        device: type of the device that computes, "cpu" or "cuda".

    Attributes:
        step_seconds: duration of a step of the rows; 0 if not measured yet.
        steps: number of decode steps in a round while no prompt waits.
        widest: most prompt tokens in a round if no row waits for its next token. Completed prompts of so many tokens
            join one round later.
        gather_seconds: longest time that the first call of a batch waits for calls that other threads prepare.
    """

    def __init__(self, patience: float, device: str) -> None:
        self.step_seconds, self.steps, self.widest = 0.0, 1, _WIDEST_CHUNK[device]
        self.gather_seconds = patience / 2
        self._patience = patience
        self._latest_speed = math.inf  # prompt tokens per second of the latest pass
        self._speed = 0.0  # prompt tokens per second on rank 0, without the fixed time of a pass; 0 if not measured yet

    @property
    def chunk(self) -> int:
        """Number of prompt tokens that a round runs beside a decode step, so that its rows wait at most `patience`.

        The number is 4, 5, 6 or 7 times a power of two, so that small changes of the speed do not change a prompt's
        chunks.
        """
        if not self._speed:
            return _FIRST_CHUNK
        seconds = _SHARE_OF_PATIENCE * self._patience + (1 - _FIXED_SHARE) * self.step_seconds
        tokens = max(_MIN_CHUNK, min(int(self._speed * seconds), self.widest))
        least = 1 << tokens.bit_length() - 3
        return tokens // least * least

    @property
    def pause(self) -> float:
        """Seconds without a new call after which no further call is expected at the start of a batch."""
        return min(self.step_seconds / 4, _LONGEST_PAUSE)

    def measure(self, schedule: Schedule, output: RoundOutput, seconds: float) -> None:
        """Adjust the sizes of the next rounds to the duration of the round that has just ended."""
        # A pass of fewer tokens takes almost as long, and says little.
        typical = schedule.chunk // 2 if self._speed else 0
        if output.prompt_tokens >= max(_MIN_CHUNK, typical):
            # Limit the fixed time to a quarter of the pass: on a cold processor, a step takes several times as long.
            fixed = min(_FIXED_SHARE * self.step_seconds, output.prompt_seconds / 4)
            speed = output.prompt_tokens / max(output.prompt_seconds - fixed, _MIN_SECONDS)
            # Later tokens of a prompt attend to more tokens: expect the next chunk to be slower by the same factor.
            trend = min(1.0, speed / self._latest_speed) if output.prompt_begin else 1.0
            # A lower speed counts at once, so that rows do not wait. A higher speed counts fully only after a wide
            # pass, because the speed of short passes varies.
            is_wide = output.prompt_tokens >= 2 * schedule.chunk
            self._speed = _careful(self._speed, speed * trend, 1.0 if is_wide else 1 / 2)
            self._latest_speed = speed
        elif not output.prompt_tokens and output.steps:
            step = max((seconds - output.prompt_seconds) / output.steps, _MIN_SECONDS)
            self.step_seconds = _careful(self.step_seconds, step, 1 / 8)  # one slow step must not lengthen the chunks
            self.steps = max(1, min(_MAX_STEPS, int(_ROUND_SECONDS / step)))

    def use_less_memory(self) -> bool:
        """Limit the prompt tokens of a round to those of a CPU, to save memory. Return whether the limit is new."""
        before, self.widest = self.widest, min(self.widest, _WIDEST_CHUNK["cpu"])
        return self.widest < before


def _careful(known: float, measured: float, weight: float) -> float:
    """Return a new estimate: the smaller of `measured` and its average with `known`, which is 0 at first."""
    return min(known * (1 - weight) + measured * weight, measured) if known else measured


class WaitingPrompt(Protocol):
    """A prompt that waits for its turn on the ranks.

    Attributes:
        length: number of tokens.
        may_be_cut: whether the prompt may run in several chunks.
    """

    length: int
    may_be_cut: bool

    @property
    def cached(self) -> int:
        """Number of first tokens that are in the prefix cache."""

    @property
    def max_beside(self) -> float:
        """Length of the longest prompt with which this prompt may share a step; 0 if it must run alone."""


_Prompt = TypeVar("_Prompt", bound=WaitingPrompt)


@dataclass(eq=False)
class Chunk(Generic[_Prompt]):
    """Tokens of prompts that one step of the model runs: some tokens of one prompt, or all of several prompts."""

    prompts: list[_Prompt]
    begin: int  # first column (token position) of the step
    end: int  # column after the last one; shorter prompts have padding up to it

    @property
    def tokens(self) -> int:
        return len(self.prompts) * (self.end - self.begin)

    @property
    def lengths(self) -> list[int]:
        return [prompt.length for prompt in self.prompts]

    @property
    def length(self) -> int:
        return max(self.lengths)

    @property
    def is_last(self) -> bool:
        return self.end == self.length


def chunks_of(waiting: Sequence[_Prompt], done: int, most: int, max_steps: int) -> list[Chunk[_Prompt]]:
    """Divide the first waiting prompts into the steps of the next pass. Only the last step may leave a prompt
    unfinished.

    Args:
        waiting: prompts in the order in which they run, at least one.
        done: number of tokens of the first prompt that have run.
        most: most tokens of the pass; 0 to run the first prompt whole.
        max_steps: most steps that one pass can run. If a pass has a single step, prompts side by side have padding.
    """
    chunks, left, is_joint = list[Chunk[_Prompt]](), [*waiting], max_steps > 1
    while left and (not chunks or (len(chunks) < max_steps and chunks[-1].is_last and most >= _WORTH_A_STEP)):
        # If the next prompt can fill the last chunk of a long prompt, the chunks are as long as possible.
        chunks.append(_chunk(left, 0 if chunks else done, most, is_joint, fills=is_joint and len(waiting) > 1))
        del left[: len(chunks[-1].prompts)]
        most -= chunks[-1].tokens
    return chunks


def _chunk(waiting: list[_Prompt], done: int, most: int, is_joint: bool, fills: bool) -> Chunk[_Prompt]:
    prompts, begin = ([waiting[0]], done) if done else _side_by_side(waiting, most, is_joint)
    whole = Chunk(prompts, begin, max(prompt.length for prompt in prompts))
    if not 0 < most < whole.tokens or not prompts[0].may_be_cut:
        return whole
    # A single prompt is too long for the pass. It runs in equal chunks, because a short chunk would read all weights,
    # too.
    passes = math.ceil(whole.tokens / most)
    return Chunk(prompts, begin, begin + (most if fills else math.ceil(whole.tokens / passes)))


def _side_by_side(waiting: list[_Prompt], most: int, is_joint: bool) -> tuple[list[_Prompt], int]:
    """Choose the first waiting prompts that can run in one step. Return them, and the number of first tokens of each
    that are in the prefix cache and need not run again."""
    again = _WORTH_A_STEP if is_joint else _WORTH_A_PASS
    chosen, known, lengths, begin = list[_Prompt](), list[int](), list[int](), 0
    for prompt in waiting:
        longest, common = max([*lengths, prompt.length]), min([*known, prompt.cached])
        fits = prompt.max_beside >= longest and max([*known, prompt.cached]) - common < again
        fits_padded = not is_joint or longest - min([*lengths, prompt.length]) < again
        if chosen and (not (fits and fits_padded) or (longest - common) * (len(chosen) + 1) > most):
            break
        chosen, known, lengths = [*chosen, prompt], [*known, prompt.cached], [*lengths, prompt.length]
        begin = common
        if not fits:
            break
    return chosen, begin
