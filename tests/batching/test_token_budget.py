"""Tests the sizes of rounds against simulated ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parallelformers_ng.batching.round_messages import RoundOutput, Schedule
from parallelformers_ng.batching.scheduler import TokenBudget

STEP, PATIENCE = 0.06, 0.2


def order(chunk: int) -> Schedule:
    return Schedule(chunk=chunk)


def measured(device: str = "cpu") -> TokenBudget:
    """Return a budget that knows the duration of a step."""
    budget = TokenBudget(PATIENCE, device)
    budget.measure(order(0), RoundOutput(steps=1), STEP)
    return budget


def run(budget: TokenBudget, cost: Callable[[int, int], float], length: int) -> list[tuple[int, float]]:
    """Return the tokens and seconds of each pass of a prompt whose pass of `tokens` from `begin` takes `cost(tokens,
    begin)`."""
    passes, begin = list[tuple[int, float]](), 0
    while begin < length:
        tokens = min(budget.chunk, length - begin)
        seconds = cost(tokens, begin)
        output = RoundOutput(prompt_tokens=tokens, prompt_begin=begin, prompt_seconds=seconds)
        budget.measure(order(budget.chunk), output, seconds)
        passes.append((tokens, seconds))
        begin += tokens
    return passes


@pytest.mark.parametrize("fixed", [0.01, 0.03, 0.05])
@pytest.mark.parametrize("of_token", [0.0003, 0.0008, 0.003])
def test_rounds_end_within_the_patience(fixed: float, of_token: float) -> None:
    """A pass takes a fixed time and a time for each token, which doubles within 4,000 earlier tokens."""
    budget = measured()
    for _ in range(3):  # only the very first pass is of an unknown speed
        passes = run(budget, lambda tokens, begin: fixed + tokens * of_token * (1 + begin / 4000), 3000)
        known = passes[1:]
        assert max(seconds for _, seconds in known) <= PATIENCE + STEP
    best = passes[len(passes) // 2]
    assert best[1] > 0.6 * PATIENCE or best[0] == 1024, "the passes are much smaller than they may be"


def usual(tokens: int, begin: int) -> float:
    return 0.045 + 0.0007 * tokens


def test_a_wide_pass_gives_the_speed() -> None:
    budget = measured()
    run(budget, usual, 3000)
    before = budget.chunk
    run(budget, lambda tokens, begin: usual(tokens, begin) + 0.15, before)
    assert budget.chunk < before, "the pass was slow"
    budget.measure(order(budget.chunk), RoundOutput(prompt_tokens=1024, prompt_seconds=usual(1024, 0)), 1.0)
    assert budget.chunk >= before


def test_one_slow_pass_costs_few_small_ones() -> None:
    budget = measured()
    run(budget, usual, 3000)
    before = budget.chunk
    run(budget, lambda tokens, begin: usual(tokens, begin) + 0.15, before)
    assert budget.chunk < before
    run(budget, usual, 2 * before)
    assert budget.chunk >= 0.75 * before


def test_sizes_of_pieces_have_limits() -> None:
    budget = TokenBudget(PATIENCE, "cuda")
    assert budget.chunk == 128, "no pass has run yet"
    run(budget, lambda tokens, begin: 1e-9, 10_000)
    assert budget.chunk == budget.widest == 4096
    assert budget.use_less_memory()
    assert budget.chunk == budget.widest == 1024
    assert not budget.use_less_memory()
    run(budget, lambda tokens, begin: 10.0 * tokens, 2000)
    assert budget.chunk == 8


def test_pieces_fit_the_patience_of_decoding_rows() -> None:
    budget = TokenBudget(0.05, "cpu")
    for speed, tokens in ((0.0, 128), (1.0, 8), (1000.0, 40), (20_000.0, 768), (1e9, 1024)):
        budget._speed = speed
        assert budget.chunk == tokens


def test_passes_of_few_tokens_say_nothing() -> None:
    budget = measured()
    run(budget, lambda tokens, begin: 0.001 * tokens, 3000)
    before = budget.chunk
    budget.measure(order(before), RoundOutput(prompt_tokens=5, prompt_seconds=0.06), 0.06)
    assert budget.chunk == before


def test_short_steps_share_a_round() -> None:
    budget = TokenBudget(PATIENCE, "cpu")
    budget.measure(order(0), RoundOutput(steps=1), 0.004)
    assert (budget.steps, budget.step_seconds) == (5, 0.004)
    budget.measure(order(0), RoundOutput(steps=1), 1.0)
    assert budget.steps == 1
    assert budget.step_seconds < 0.2, "one slow step must not lengthen the pieces much"


def test_a_clock_that_stands_still() -> None:
    budget = TokenBudget(PATIENCE, "cpu")
    budget.measure(order(0), RoundOutput(steps=1), 0.0)
    budget.measure(order(64), RoundOutput(prompt_tokens=64), 0.0)
    assert budget.chunk > 0
    assert budget.steps > 0
