"""Tests how the router of Ray Serve chooses a replica."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install '.[ray]'")

from parallelformers_ng.serving.ray_router import FewestRequests

REPLICAS = [SimpleNamespace(replica_id=name) for name in "abc"]


class Future:
    is_cancelled = False

    def cancelled(self) -> bool:
        return self.is_cancelled


def request(number: int) -> SimpleNamespace:
    name = SimpleNamespace(internal_request_id=str(number))
    return SimpleNamespace(metadata=name, future=Future(), routing_context=SimpleNamespace(should_backoff=False))


@pytest.fixture
def router() -> FewestRequests:
    new_router = FewestRequests.__new__(FewestRequests)  # the constructor of Ray Serve's router would start tasks
    new_router.initialize_state()
    return new_router


def choice_of(router: FewestRequests, pending: SimpleNamespace) -> str:
    (first,), others = asyncio.run(router.choose_replicas(REPLICAS, pending))
    assert {first.replica_id, *(each.replica_id for each in others)} == set("abc")
    assert pending.routing_context.should_backoff
    return first.replica_id


def test_requests_that_come_together_are_spread(router: FewestRequests) -> None:
    assert Counter(choice_of(router, request(number)) for number in range(12)) == {"a": 4, "b": 4, "c": 4}


def test_idle_replica_is_chosen_next(router: FewestRequests) -> None:
    first = {choice_of(router, request(number)): number for number in range(3)}
    router.on_request_completed("b", str(first["b"]))
    assert choice_of(router, request(3)) == "b"


def test_rerouted_and_cancelled_requests_are_counted_rightly(router: FewestRequests) -> None:
    pending = [request(number) for number in range(3)]
    first = {choice_of(router, each): each for each in pending}
    router.on_request_routed(first["b"], "a", None)
    assert choice_of(router, request(3)) == "b"
    first["c"].future.is_cancelled = True
    assert choice_of(router, request(4)) == "c"


def test_early_answer_leaves_no_count_behind(router: FewestRequests) -> None:
    pending = request(0)
    replica = choice_of(router, pending)
    router.on_request_completed(replica, "0")
    router.on_request_routed(pending, replica, None)
    assert not router._open_requests
