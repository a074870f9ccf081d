"""Tests collectives within a stage, interleaved with collectives of all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import CollectiveAbortedError
from tests.helpers.rank_group import SLOT_BYTES, RankGroup, connect_gloo, meet, reset_gloo

WIDTH, COUNT = 2, 2 * SLOT_BYTES


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankGroup]:
    group = RankGroup(4)
    yield group
    group.close()


def _check_stages(communicator: Communicator) -> None:
    """Check that stages may take any number of steps between collectives of all ranks."""
    rank, world_size = communicator.rank, communicator.world_size
    within = communicator.within(WIDTH)
    assert within is communicator.within(WIDTH)
    assert communicator.within(world_size) is communicator
    stage, place = divmod(rank, WIDTH)
    assert (within.rank, within.world_size) == (place, WIDTH)
    members = range(stage * WIDTH, (stage + 1) * WIDTH)
    for _ in range(3):
        for _ in range(4 * stage):
            assert within.all_reduce(torch.full((COUNT,), float(rank))).eq(sum(members)).all()
        gathered = within.all_gather(torch.full((rank + 1, 3), rank), 0, [each + 1 for each in members])
        assert gathered[:, 0].tolist() == [each for each in members for _ in range(each + 1)]
        assert communicator.all_reduce(torch.full((COUNT,), float(rank))).eq(sum(range(world_size))).all()


def _wait_for_a_peer(communicator: Communicator) -> str:
    """Wait in collectives that rank 3 aborts: rank 0 among all ranks, rank 2 within its stage."""
    meet(communicator)
    if communicator.rank == 3:
        time.sleep(0.05)
        communicator.abort("out of luck")
    with pytest.raises(CollectiveAbortedError) as caught:
        meet(communicator.within(WIDTH) if communicator.rank == 2 else communicator)
    return str(caught.value)


def _come_late(communicator: Communicator) -> str:
    if communicator.rank == 3:
        return "ranks [3] did not come"
    with pytest.raises(CollectiveAbortedError) as caught:
        meet(communicator.within(WIDTH) if communicator.rank == 2 else communicator)
    return str(caught.value)


def test_stages_exchange_among_themselves(four_ranks: RankGroup) -> None:
    four_ranks.run(_check_stages)


def test_abort_ends_waits_within_a_stage(four_ranks: RankGroup) -> None:
    assert all("rank 3: out of luck" in why for why in four_ranks.run(_wait_for_a_peer))
    four_ranks.reset()
    four_ranks.run(_check_stages)


def test_timeout_within_a_stage_names_late_rank(four_ranks: RankGroup) -> None:
    assert "did not come" in four_ranks.run(_come_late, timeout=0.2)[2]
    four_ranks.reset()
    four_ranks.run(_check_stages)


def _check_gloo(communicator: Communicator, rendezvous: str, arena: str) -> None:
    gloo = connect_gloo(communicator, rendezvous, arena)
    _check_stages(gloo)
    assert "out of luck" in _wait_for_a_peer(gloo)
    reset_gloo(communicator, gloo)
    _check_stages(gloo)
    gloo.close()


def test_over_gloo(four_ranks: RankGroup) -> None:
    four_ranks.run_with_gloo(_check_gloo)


def test_between_threads() -> None:
    run_ranks(4, _check_stages)

    def fail(communicator: Communicator) -> None:
        within = communicator.within(WIDTH)
        if communicator.rank == 3:
            raise ValueError("rank 3 has had enough")
        meet(within if communicator.rank == 2 else communicator)

    with pytest.raises(ValueError, match="had enough"):
        run_ranks(4, fail)
