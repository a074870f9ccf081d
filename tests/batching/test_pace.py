"""Tests the sizes of rounds against simulated ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parallelformers_ng.batching.pace import Pace
from parallelformers_ng.batching.rounds import News, Round

STEP, PATIENCE = 0.06, 0.2


def order(piece: int) -> Round:
    return Round(batch=0, joins={}, leaves=[], piece=piece, widest=1024, prefixes=0, steps=1)


def paced(device: str = "cpu") -> Pace:
    """Return a pace that knows the duration of a step."""
    pace = Pace(PATIENCE, device)
    pace.measure(order(0), News(), STEP)
    return pace


def run(pace: Pace, cost: Callable[[int, int], float], length: int) -> list[tuple[int, float]]:
    """Return the tokens and seconds of each pass of a prompt whose pass of `tokens` from `begin` takes `cost(tokens,
    begin)`."""
    passes, begin = list[tuple[int, float]](), 0
    while begin < length:
        tokens = min(pace.piece, length - begin)
        seconds = cost(tokens, begin)
        news = News(prompt_tokens=tokens, prompt_begin=begin, prompt_seconds=seconds)
        pace.measure(order(pace.piece), news, seconds)
        passes.append((tokens, seconds))
        begin += tokens
    return passes


@pytest.mark.parametrize("fixed", [0.01, 0.03, 0.05])
@pytest.mark.parametrize("of_token", [0.0003, 0.0008, 0.003])
def test_rounds_end_within_the_patience(fixed: float, of_token: float) -> None:
    """A pass takes a fixed time and a time for each token, which doubles within 4,000 earlier tokens."""
    pace = paced()
    for _ in range(3):  # only the very first pass is of an unknown speed
        passes = run(pace, lambda tokens, begin: fixed + tokens * of_token * (1 + begin / 4000), 3000)
        known = passes[1:]
        assert max(seconds for _, seconds in known) <= PATIENCE + STEP
    best = passes[len(passes) // 2]
    assert best[1] > 0.6 * PATIENCE or best[0] == 1024, "the passes are much smaller than they may be"


def usual(tokens: int, begin: int) -> float:
    return 0.045 + 0.0007 * tokens


def test_a_wide_pass_gives_the_speed() -> None:
    pace = paced()
    run(pace, usual, 3000)
    before = pace.piece
    run(pace, lambda tokens, begin: usual(tokens, begin) + 0.15, before)
    assert pace.piece < before, "the pass was slow"
    pace.measure(order(pace.piece), News(prompt_tokens=1024, prompt_seconds=usual(1024, 0)), 1.0)
    assert pace.piece >= before


def test_one_slow_pass_costs_few_small_ones() -> None:
    pace = paced()
    run(pace, usual, 3000)
    before = pace.piece
    run(pace, lambda tokens, begin: usual(tokens, begin) + 0.15, before)
    assert pace.piece < before
    run(pace, usual, 2 * before)
    assert pace.piece >= 0.75 * before


def test_sizes_of_pieces_have_limits() -> None:
    pace = Pace(PATIENCE, "cuda")
    assert pace.piece == 128, "no pass has run yet"
    run(pace, lambda tokens, begin: 1e-9, 10_000)
    assert pace.piece == pace.widest == 4096
    assert pace.use_less_memory()
    assert pace.piece == pace.widest == 1024
    assert not pace.use_less_memory()
    run(pace, lambda tokens, begin: 10.0 * tokens, 2000)
    assert pace.piece == 8


def test_pieces_fit_the_patience_of_decoding_rows() -> None:
    pace = Pace(0.05, "cpu")
    for speed, tokens in ((0.0, 128), (1.0, 8), (1000.0, 40), (20_000.0, 768), (1e9, 1024)):
        pace._speed = speed
        assert pace.piece == tokens


def test_passes_of_few_tokens_say_nothing() -> None:
    pace = paced()
    run(pace, lambda tokens, begin: 0.001 * tokens, 3000)
    before = pace.piece
    pace.measure(order(before), News(prompt_tokens=5, prompt_seconds=0.06), 0.06)
    assert pace.piece == before


def test_short_steps_share_a_round() -> None:
    pace = Pace(PATIENCE, "cpu")
    pace.measure(order(0), News(), 0.004)
    assert (pace.steps, pace.step_seconds) == (5, 0.004)
    pace.measure(order(0), News(), 1.0)
    assert pace.steps == 1
    assert pace.step_seconds < 0.2, "one slow step must not lengthen the pieces much"


def test_a_clock_that_stands_still() -> None:
    pace = Pace(PATIENCE, "cpu")
    pace.measure(order(0), News(), 0.0)
    pace.measure(order(64), News(prompt_tokens=64), 0.0)
    assert pace.piece > 0
    assert pace.steps > 0
