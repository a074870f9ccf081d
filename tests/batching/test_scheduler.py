"""Tests the scheduler's decisions without processes: recorded arrivals and costs give a sequence of rounds."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from parallelformers_ng.batching.round_messages import RoundOutput, Schedule
from parallelformers_ng.batching.scheduler import Chunk, Scheduler, chunks_of
from parallelformers_ng.options import BatchingOptions

STEP, PASS, TOKEN = 0.01, 0.005, 0.001
"""Seconds of a decode step, of a pass over prompts, and of a prompt token in the pass."""


@dataclass(eq=False)
class Arrival:
    """A recorded call. The fields are also those of a ticket and of a waiting prompt."""

    at: float  # seconds
    length: int  # prompt tokens
    new: int  # new tokens
    priority: int = 0
    adapters: Any = None
    cached: int = 0
    max_beside: float = float("inf")
    may_be_cut: bool = True
    needs_solitude: bool = False
    is_suspect: bool = False
    decodes: bool = False
    streams: bool = True
    tokens: int = 0  # new tokens so far
    number: int = field(default=0, init=False)

    @property
    def prompt_tokens(self) -> int:
        return self.length

    @property
    def tokens_needed(self) -> int:
        return self.length + self.new


@dataclass
class Played:
    """A round that has run."""

    at: float
    schedule: Schedule
    prompts: list[tuple[int, int, int]]  # number of a call, and the columns of its prompt that ran
    rows: list[int]  # numbers of the calls that got tokens


class Replay:
    """Ranks without a model: a round takes the time of its tokens, and each call gets its number of new tokens.

    Args:
        max_steps: most steps of the model in one pass; 1 if C does not compute the layers.
    """

    def __init__(self, arrivals: list[Arrival], max_steps: int = 16, **options: int) -> None:
        self.scheduler = Scheduler(BatchingOptions(**options), "cpu")
        self.rounds, self.time = list[Played](), 0.0
        self._max_steps = max_steps
        self._arrivals = deque(sorted(arrivals, key=lambda call: call.at))
        self._waiting, self._running = dict[int, Arrival](), dict[int, Arrival]()
        self._prompts, self._done, self._late = list[Arrival](), 0, list[Arrival]()
        self._count = 0

    def run(self) -> list[Played]:
        while self._arrivals or self._waiting or self._running:
            if not (self._waiting or self._running):
                self.time = max(self.time, self._arrivals[0].at)
            while self._arrivals and self._arrivals[0].at <= self.time:
                call = self._arrivals.popleft()
                call.number = self._count
                self._waiting[self._count] = call
                self._count += 1
            self._round()
        return self.rounds

    def _round(self) -> None:
        schedule = self.scheduler.next_round(self._waiting, self._running, in_chunks=True)
        for number in schedule.admitted:
            self._running[number] = self._waiting.pop(number)
            self._prompts.append(self._running[number])
        rows = [call for call in self._running.values() if call.decodes]
        late, self._late = self._late, []
        chunks: list[Chunk[Arrival]] = []
        if self._prompts and not late:
            chunks = chunks_of(self._prompts, self._done, schedule.max_tokens, self._max_steps - bool(rows))
            assert sum(chunk.tokens for chunk in chunks) <= schedule.max_tokens
            self._done = 0 if chunks[-1].is_last else chunks[-1].end
        completed = [call for chunk in chunks if chunk.is_last for call in chunk.prompts]
        self._prompts = self._prompts[len(completed) :]
        joins = [*late, *completed]
        if 0 < schedule.late_tokens <= sum(call.length for call in completed):
            self._late, joins = completed, late
        steps = schedule.steps_between_prompts if self._prompts else schedule.steps
        for call in joins:
            call.tokens += 1
        got = {call.number for call in (*joins, *(rows if steps else ()))}
        for call in (*rows, *joins):
            call.tokens = min(call.tokens + steps, call.new)
        tokens = sum(chunk.tokens for chunk in chunks)
        seconds = PASS + TOKEN * tokens if tokens else 0.0
        output = RoundOutput(prompt_tokens=tokens, prompt_seconds=seconds, steps=steps * bool(rows or joins))
        output.prompt_begin = chunks[-1].begin if chunks else 0
        seconds += STEP * steps * bool(rows or joins)
        prompts = [(call.number, chunk.begin, chunk.end) for chunk in chunks for call in chunk.prompts]
        self.rounds.append(Played(self.time, schedule, prompts, sorted(got)))
        self.time += seconds
        self.scheduler.budget.measure(schedule, output, seconds)
        for call in (*joins, *self._late):
            call.decodes = True
        self._running = {number: call for number, call in self._running.items() if call.tokens < call.new}


def prompts_of(rounds: list[Played]) -> list[list[tuple[int, int, int]]]:
    return [played.prompts for played in rounds if played.prompts]


def test_first_calls_run_in_one_pass() -> None:
    """Three calls come at once. Their prompts fill one pass, and all rows decode several steps a round."""
    rounds = Replay([Arrival(0, 30, 4), Arrival(0, 200, 9), Arrival(0, 40, 4)]).run()
    assert prompts_of(rounds) == [[(0, 0, 30), (1, 0, 200), (2, 0, 40)]]
    first, second, *_ = rounds
    assert (first.schedule.admitted, first.schedule.max_tokens, first.rows) == ((0, 1, 2), 1024, [0, 1, 2])
    assert (second.schedule.admitted, second.rows) == ((), [0, 1, 2])
    assert {played.schedule.steps for played in rounds[2:]} == {2}, "two steps of 10 ms fill a round of 20 ms"


def test_long_prompt_runs_in_chunks_beside_rows() -> None:
    """A row decodes; a prompt of 1,000 tokens comes, and a short one. Each round runs a chunk and one step."""
    rounds = Replay([Arrival(0, 100, 60), Arrival(0.12, 1000, 2), Arrival(0.12, 50, 2)]).run()
    passes = [played for played in rounds if played.prompts][1:]
    assert [played.schedule.steps_between_prompts for played in passes] == [1] * len(passes)
    assert all(0 in played.rows for played in passes), "the row gets a token in each round"
    assert max(sum(end - begin for _, begin, end in played.prompts) for played in passes) <= 192
    assert [number for played in passes for number, *_ in played.prompts][-1] == 2
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(passes)]
    assert max(gaps) <= 0.2 + STEP


def test_prompts_alone_do_not_wait_for_steps() -> None:
    """Without rows, prompts run in wide passes, and no step comes between: more rows will share the later steps."""
    rounds = Replay([Arrival(0, 900, 9) for _ in range(3)]).run()
    assert prompts_of(rounds)[0] == [(0, 0, 900), (1, 0, 124)]
    assert rounds[0].schedule.steps_between_prompts == 0
    assert rounds[1].schedule.max_tokens < 1024, "the first row decodes now"


def test_callers_of_whole_answers_wait_for_few_prompts() -> None:
    """16 calls of 256 and 4 tokens: if nobody reads single tokens, they need 4 passes and the steps of one call."""
    seconds = list[float]()
    for streams in (False, True):
        replay = Replay([Arrival(0, 256, 4, streams=streams) for _ in range(16)])
        rounds = replay.run()
        seconds.append(replay.time)
        if not streams:
            assert [len(prompts) for prompts in prompts_of(rounds)] == [4, 4, 4, 4]
            steps = [len(played.rows) for played in rounds[4:]]
            assert set(steps) == {16}
    assert seconds[0] < 0.95 * seconds[1]
    # Many prompts run beside the steps of the row, whose caller would otherwise wait too long.
    calls = [Arrival(0, 9, 30, streams=False), *(Arrival(0.05, 900, 3, streams=False) for _ in range(8))]
    rounds = Replay(calls).run()
    beside = [played for played in rounds if played.schedule.steps_between_prompts]
    assert 0 in beside[0].rows
    assert 4 < sum(bool(played.prompts) for played in beside) < sum(bool(played.prompts) for played in rounds)


def test_prompts_in_a_row_are_few_only_together() -> None:
    """Prompts that come one after another, each when the last has run, must not keep a row from its next token."""
    calls = [Arrival(0, 9, 3, streams=False), *(Arrival(0.02 + 0.5 * n, 900, 9, streams=False) for n in range(12))]
    rounds = Replay(calls).run()
    ended = next(played.at for played in rounds if 0 in played.rows and played.at > 0.02)
    assert ended < 6, "the row waits for four widest passes at most"


def test_wide_prompts_join_one_round_later() -> None:
    schedule = Scheduler(BatchingOptions(), "cpu").next_round({}, {0: Arrival(0, 9, 9, decodes=True)}, True)
    assert (schedule.late_tokens, schedule.max_tokens, schedule.steps_between_prompts) == (1024, 128, 1)
    schedule = Scheduler(BatchingOptions(), "cpu").next_round({}, {0: Arrival(0, 9, 9)}, True)
    assert (schedule.late_tokens, schedule.max_tokens, schedule.steps_between_prompts) == (0, 1024, 0)
    schedule = Scheduler(BatchingOptions(), "cuda").next_round({}, {0: Arrival(0, 9, 9, decodes=True)}, False)
    assert (schedule.late_tokens, schedule.max_tokens, schedule.chunk) == (0, 0, 0), "prompts run whole"


@pytest.mark.parametrize(
    ("waiting", "running", "admitted"),
    [
        ([(3, 9), (3, 9), (3, 9)], [(3, 9)], (1, 2, 3)),  # 4 rows
        ([(3, 9), (3, 9), (3, 9), (3, 9)], [(3, 9)], (1, 2, 3)),
        ([(3, 30), (3, 9)], [(3, 9)], (1,)),  # 30 × 3 > 80 tokens
        ([(3, 90)], [], (0,)),  # a call alone always runs; longer calls are refused when they come
        ([(3, 90), (3, 9)], [(3, 9)], ()),  # the short call does not overtake
    ],
)
def test_calls_join_while_rows_and_memory_last(
    waiting: list[tuple[int, int]], running: list[tuple[int, int]], admitted: tuple[int, ...]
) -> None:
    scheduler = Scheduler(BatchingOptions(rows=4, cache_tokens=80), "cpu")
    calls = [Arrival(0, length, needed - length) for length, needed in (*running, *waiting)]
    before = dict(enumerate(calls[: len(running)]))
    after = {number: call for number, call in enumerate(calls) if number not in before}
    assert scheduler.next_round(after, before, True).admitted == admitted


def test_rows_in_pages_count_their_own_tokens() -> None:
    scheduler = Scheduler(BatchingOptions(cache_tokens=100), "cpu")
    running, waiting = {0: Arrival(0, 60, 10)}, {1: Arrival(0, 5, 5), 2: Arrival(0, 5, 15), 3: Arrival(0, 1, 1)}
    assert scheduler.next_round(waiting, running, True).admitted == ()
    scheduler.learn_room([RoundOutput(token_bytes=8, pads=False)], lambda: 0)
    assert scheduler.next_round(waiting, running, True).admitted == (1, 2)


def test_suspects_and_adapters_keep_apart() -> None:
    scheduler = Scheduler(BatchingOptions(), "cpu")

    def admitted(*calls: Arrival) -> tuple[int, ...]:
        return scheduler.next_round(dict(enumerate(calls)), {}, True).admitted

    plain, suspect, lonely = Arrival(0, 3, 9), Arrival(0, 3, 9, is_suspect=True), Arrival(0, 3, 9, needs_solitude=True)
    assert admitted(plain, suspect, plain, suspect, plain) == (0, 1, 2)
    assert admitted(lonely, plain) == (0,)
    assert admitted(plain, lonely) == (0,)
    other = Arrival(0, 3, 9, adapters="b")
    assert admitted(other, other, plain) == (0, 1)


def test_urgent_calls_get_rows_first() -> None:
    """One row; the calls come in the order 0 to 4. A lower number goes first; equal numbers in order of arrival."""
    calls = [Arrival(0, 5, 3, priority=priority) for priority in (0, 5, 0, -1, 5)]
    rounds = Replay(calls, rows=1).run()
    assert [number for played in rounds for number in played.schedule.admitted] == [3, 0, 2, 1, 4]


def test_no_call_starves() -> None:
    """Urgent calls come for ever; the call without priority gets the row after 16 of them."""
    urgent = [Arrival(0.001 * number, 5, 2, priority=-1) for number in range(40)]
    rounds = Replay([Arrival(0, 5, 2), *urgent], rows=1).run()
    order = [number for played in rounds for number in played.schedule.admitted]
    assert order.index(0) == 16


@pytest.mark.parametrize("seed", range(20))
def test_random_arrivals(seed: int) -> None:
    """Every call ends. Rows and memory stay within their limits, and equal priorities keep their order."""
    numbers = random.Random(seed)
    calls = [
        Arrival(
            numbers.random() * 3,
            numbers.choice((1, 7, 60, 500)),
            numbers.randint(1, 40),
            numbers.choice((0, 0, -2)),
            cached=0,
            max_beside=numbers.choice((float("inf"), 0, 100)),
        )
        for _ in range(60)
    ]
    replay = Replay(calls, numbers.choice((1, 16)), rows=4, cache_tokens=1200)
    next_round = replay.scheduler.next_round

    def checked(waiting: dict[int, Arrival], running: dict[int, Arrival], in_chunks: bool) -> Schedule:
        schedule = next_round(waiting, running, in_chunks)
        rows = [*running.values(), *(waiting[number] for number in schedule.admitted)]
        assert len(rows) <= 4
        assert max(call.tokens_needed for call in rows) * len(rows) <= 1200
        return schedule

    replay.scheduler.next_round = checked  # type: ignore[method-assign, assignment]
    rounds = replay.run()
    assert all(call.tokens == call.new for call in calls)
    order = [number for played in rounds for number in played.schedule.admitted]
    assert sorted(order) == [*range(60)]
    by_number = {call.number: call for call in calls}
    for priority in (0, -2):
        alike = [number for number in order if by_number[number].priority == priority]
        assert alike == sorted(alike)


def test_room_is_half_of_the_free_memory() -> None:
    scheduler = Scheduler(BatchingOptions(), "cpu")
    reports: Any = [SimpleNamespace(token_bytes=size, free_bytes=0, pads=False) for size in (10, 0)]
    scheduler.learn_room(reports, lambda: 1000)
    assert scheduler.room == float("inf"), "a rank without rows has measured nothing"
    reports[1].token_bytes = 15
    scheduler.learn_room(reports, lambda: 1000)
    assert scheduler.room == 20
    scheduler.learn_room(reports, lambda: 9999)
    assert scheduler.room == 20
