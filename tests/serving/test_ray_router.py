"""The choice of a replica on Ray Serve."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'parallelformers-ng[ray]'")

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
    made = FewestRequests.__new__(FewestRequests)  # Serve's own part starts tasks
    made.initialize_state()
    return made


def asked(router: FewestRequests, pending: SimpleNamespace) -> str:
    (first,), others = asyncio.run(router.choose_replicas(REPLICAS, pending))
    assert {first.replica_id, *(each.replica_id for each in others)} == set("abc")
    assert pending.routing_context.should_backoff
    return first.replica_id


def test_requests_that_come_together_are_spread(router: FewestRequests) -> None:
    assert Counter(asked(router, request(number)) for number in range(12)) == {"a": 4, "b": 4, "c": 4}


def test_a_replica_that_has_answered_is_asked_next(router: FewestRequests) -> None:
    first = {asked(router, request(number)): number for number in range(3)}
    router.on_request_completed("b", str(first["b"]))
    assert asked(router, request(3)) == "b"


def test_what_another_took_and_what_was_given_up_count_where_they_are(router: FewestRequests) -> None:
    pending = [request(number) for number in range(3)]
    first = {asked(router, each): each for each in pending}
    router.on_request_routed(first["b"], "a", None)
    assert asked(router, request(3)) == "b"
    first["c"].future.is_cancelled = True
    assert asked(router, request(4)) == "c"


def test_an_answer_before_word_of_its_way_leaves_nothing(router: FewestRequests) -> None:
    pending = request(0)
    replica = asked(router, pending)
    router.on_request_completed(replica, "0")
    router.on_request_routed(pending, replica, None)
    assert not router._asked
