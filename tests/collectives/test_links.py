"""The exchange between leaders of hosts, and the records that they did not take."""

from __future__ import annotations

import itertools
import socket
import threading

import pytest

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.links import Links
from parallelformers_ng.errors import CollectiveAbortedError, DivergedError
from parallelformers_ng.wire.signed import Session
from tests.helpers.patience import PROMPTLY


@pytest.fixture
def leaders():
    """The leaders of three hosts."""
    made = {host: {} for host in range(3)}
    for one, other in itertools.combinations(made, 2):
        ours, theirs = socket.socketpair()
        made[one][other] = ours, Session(b"a" * 32, b"b" * 32)
        made[other][one] = theirs, Session(b"b" * 32, b"a" * 32)
    arenas = [Arena.create(1) for _ in made]
    found = [Links(host, made[host], arenas[host], PROMPTLY) for host in made]
    yield found
    for links, arena in zip(found, arenas, strict=True):
        links.close()
        arena.close()


def together(leaders, sizes, own=None):
    """Return each leader's result or error when all exchange; a leader whose `own` is None does not come."""
    found = {}

    def exchange(host, data):
        try:
            found[host] = [bytes(part) for part in leaders[host].exchange(data, sizes[host])]
        except Exception as error:
            found[host] = error

    data = [bytes([host]) * sizes[host][host] for host in range(3)] if own is None else own
    threads = [
        threading.Thread(target=exchange, args=(host, each)) for host, each in enumerate(data) if each is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("sizes", [[5, 5, 5], [0, 3, 1 << 20], [1 << 22, 1 << 22, 1 << 22], [0, 0, 7]])
def test_every_leader_gets_what_all_hold_in_their_order(leaders, sizes):
    for _ in range(2):
        found = together(leaders, [sizes] * 3)
        due = [bytes([host]) * size for host, size in enumerate(sizes)]
        assert [found[host] for host in range(3)] == [due] * 3


def test_nobody_waits_when_all_has_come(leaders, monkeypatch):
    """With nothing to wait for, no connection would end the wait."""
    wait = Links._wait

    def watched(self, start, missing):
        assert missing or any(link.has_unsent for link in self._links.values())
        wait(self, start, missing)

    monkeypatch.setattr(Links, "_wait", watched)
    found = together(leaders, [[5, 5, 5]] * 3)
    assert found[0] == [b"\0" * 5, b"\1" * 5, b"\2" * 5]


def test_leaders_with_other_sizes_are_told_so_and_go_on_after_a_reset(leaders):
    leaders[2]._timeout = 0.2  # the others may have left before they sent it anything
    found = together(leaders, [[4, 4, 4], [8, 8, 8], [4, 8, 4]])
    leaders[2]._timeout = PROMPTLY
    assert isinstance(found[0], DivergedError)
    assert isinstance(found[1], DivergedError)
    for links in leaders:
        links.reset()
    assert together(leaders, [[2, 2, 2]] * 3)[2] == [b"\0\0", b"\1\1", b"\2\2"]


def test_what_was_sent_to_who_did_not_come_is_dropped_after_a_reset(leaders):
    """More than a connection holds, so that a part of it is not even sent."""
    size = 4 << 20
    for links in leaders:
        links._timeout = 0.2
    found = together(leaders, [[size] * 3] * 3, [b"x" * size, None, b"z" * size])
    assert isinstance(found[0], CollectiveAbortedError)
    assert isinstance(found[2], CollectiveAbortedError)
    for links in leaders:
        links._timeout = PROMPTLY
        links.reset()
    assert together(leaders, [[3, 3, 3]] * 3)[1] == [b"\0\0\0", b"\1\1\1", b"\2\2\2"]


def test_what_was_not_signed_by_the_leader_is_not_taken(leaders):
    link = leaders[0]._links[1]
    link.put(0, 1, b"four")
    for index, part in enumerate(link._unsent):
        if bytes(part) == b"four":
            link._unsent[index] = memoryview(b"five")
    link.send()
    found = together(leaders, [[4, 4, 4]] * 3, [None, b"1111", None])
    assert isinstance(found[1], CollectiveAbortedError)
    assert "not what the other host sent" in str(found[1])


def test_an_abort_of_the_host_ends_the_wait(leaders):
    leaders[2]._arena.abort("somebody raised", 0)
    found = together(leaders, [[4, 4, 4]] * 3, [None, None, b"2222"])
    assert "somebody raised" in str(found[2])
