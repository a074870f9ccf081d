"""Tests that all ranks raise an error if one rank aborts, is late, diverges or is interrupted."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import CollectiveAbortedError, DivergedError, ProtocolError
from tests.helpers.patience import PROMPTLY
from tests.helpers.rank_group import RankGroup, meet


def _wait_for_abort(communicator: Communicator) -> tuple[float, str]:
    moment = 0.0
    if communicator.rank == 0:
        time.sleep(0.1)
        communicator.abort("out of luck")
        moment = time.monotonic()
    with pytest.raises(CollectiveAbortedError) as caught:
        communicator.all_reduce(torch.ones(5000))
    return moment or time.monotonic(), str(caught.value)


def _check_works(communicator: Communicator) -> None:
    result = communicator.all_reduce(torch.full((3000,), communicator.rank + 1.0))
    assert result.eq(sum(range(1, communicator.world_size + 1))).all()


def _late_rank(communicator: Communicator, late: int) -> tuple[float, str]:
    start = time.monotonic()
    if communicator.rank == late:
        time.sleep(2.0)
    with pytest.raises(CollectiveAbortedError) as caught:
        communicator.all_reduce(torch.ones(3))
    return time.monotonic() - start, str(caught.value)


def test_abort_by_a_peer_reaches_all_at_once(ranks: RankGroup) -> None:
    answers = ranks.run(_wait_for_abort)
    assert all("rank 0: out of luck" in message for _, message in answers)
    assert max(moment for moment, _ in answers) - answers[0][0] < PROMPTLY
    ranks.reset()
    ranks.run(_check_works)


def _wait_without_rank_0(communicator: Communicator) -> tuple[float, str]:
    if communicator.rank == 0:
        return 0.0, "the parent: killed"
    with pytest.raises(CollectiveAbortedError) as caught:
        meet(communicator)
    return time.monotonic(), str(caught.value)


def test_abort_by_the_parent_reaches_all_at_once(ranks: RankGroup) -> None:
    ranks.start(_wait_without_rank_0)
    time.sleep(0.1)
    moment = time.monotonic()
    ranks.arena.abort("killed")
    for left, message in ranks.finish():
        assert left - moment < PROMPTLY
        assert "the parent: killed" in message
    ranks.reset()
    ranks.run(_check_works)


def test_timeout_names_the_late_rank(two_ranks: RankGroup) -> None:
    for waited, message in two_ranks.run(_late_rank, 1, timeout=0.2):
        assert 0.2 <= waited < PROMPTLY
        assert "ranks [1] did not come within 0.2 s" in message
    two_ranks.reset()
    two_ranks.run(_check_works)


def _diverge(communicator: Communicator) -> str:
    try:
        communicator.all_reduce(torch.ones(10 + communicator.rank))
    except (DivergedError, CollectiveAbortedError) as error:
        return type(error).__name__
    return "no error"


def test_ranks_in_different_collectives_are_found_out(two_ranks: RankGroup) -> None:
    answers = two_ranks.run(_diverge)
    assert "DivergedError" in answers
    assert set(answers) <= {"DivergedError", "CollectiveAbortedError"}
    two_ranks.reset()
    two_ranks.run(_check_works)


def _interrupted(communicator: Communicator) -> float:
    if communicator.rank:
        return 0.0

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            meet(communicator)
    finally:
        signal.signal(signal.SIGALRM, previous)
    return time.monotonic() - start


def test_a_signal_handler_runs_in_a_long_wait(two_ranks: RankGroup) -> None:
    assert two_ranks.run(_interrupted)[0] < PROMPTLY
    two_ranks.reset()
    two_ranks.run(_check_works)


def _cancelled(communicator: Communicator) -> int:
    return communicator.cancel_sequence()


def test_cancel_word_reaches_every_rank(two_ranks: RankGroup) -> None:
    two_ranks.arena.request_cancel(2**63 + 17)
    assert two_ranks.run(_cancelled) == [2**63 + 17] * 2
    two_ranks.reset()
    assert two_ranks.run(_cancelled) == [0] * 2


def _reset_too_early(communicator: Communicator) -> None:
    meet(communicator)
    with pytest.raises(ProtocolError, match=r"Arena\.reset"):
        communicator.reset()


def test_reset_before_the_parent_is_refused(two_ranks: RankGroup) -> None:
    two_ranks.run(_reset_too_early)
