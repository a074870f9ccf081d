"""Tests exchanges between the first ranks ("leaders") of hosts, and data that a leader has not read."""

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
    """Yield the links of three hosts' leaders, connected with each other."""
    connections = {host: {} for host in range(3)}
    for one, other in itertools.combinations(connections, 2):
        ours, theirs = socket.socketpair()
        connections[one][other] = ours, Session(b"a" * 32, b"b" * 32)
        connections[other][one] = theirs, Session(b"b" * 32, b"a" * 32)
    arenas = [Arena.create(1) for _ in connections]
    links_of_hosts = [Links(host, connections[host], arenas[host], PROMPTLY) for host in connections]
    yield links_of_hosts
    for links, arena in zip(links_of_hosts, arenas, strict=True):
        links.close()
        arena.close()


def together(leaders, sizes, own=None):
    """Exchange on all leaders; return each leader's parts or exception. A leader whose `own` is None stays away."""
    results = {}

    def exchange(host, data):
        try:
            results[host] = [bytes(part) for part in leaders[host].exchange(data, sizes[host])]
        except Exception as error:
            results[host] = error

    data = [bytes([host]) * sizes[host][host] for host in range(3)] if own is None else own
    threads = [
        threading.Thread(target=exchange, args=(host, each)) for host, each in enumerate(data) if each is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("sizes", [[5, 5, 5], [0, 3, 1 << 20], [1 << 22, 1 << 22, 1 << 22], [0, 0, 7]])
def test_leaders_get_all_parts_in_order(leaders, sizes):
    for _ in range(2):
        results = together(leaders, [sizes] * 3)
        due = [bytes([host]) * size for host, size in enumerate(sizes)]
        assert [results[host] for host in range(3)] == [due] * 3


def test_leader_with_all_parts_does_not_wait(leaders, monkeypatch):
    """If all data has arrived, no connection would end a wait."""
    wait = Links._wait

    def watched(self, start, missing):
        assert missing or any(link.unsent for link in self._links.values())
        wait(self, start, missing)

    monkeypatch.setattr(Links, "_wait", watched)
    results = together(leaders, [[5, 5, 5]] * 3)
    assert results[0] == [b"\0" * 5, b"\1" * 5, b"\2" * 5]


def test_diverged_leaders_raise_and_recover_after_reset(leaders):
    leaders[2]._timeout = 0.2  # the others may have left before they sent it anything
    results = together(leaders, [[4, 4, 4], [8, 8, 8], [4, 8, 4]])
    leaders[2]._timeout = PROMPTLY
    assert isinstance(results[0], DivergedError)
    assert isinstance(results[1], DivergedError)
    for links in leaders:
        links.reset()
    assert together(leaders, [[2, 2, 2]] * 3)[2] == [b"\0\0", b"\1\1", b"\2\2"]


def test_untaken_data_is_dropped_after_a_reset(leaders):
    """The data exceeds the buffer of a connection, so a part of the data is not even sent."""
    size = 4 << 20
    for links in leaders:
        links._timeout = 0.2
    results = together(leaders, [[size] * 3] * 3, [b"x" * size, None, b"z" * size])
    assert isinstance(results[0], CollectiveAbortedError)
    assert isinstance(results[2], CollectiveAbortedError)
    for links in leaders:
        links._timeout = PROMPTLY
        links.reset()
    assert together(leaders, [[3, 3, 3]] * 3)[1] == [b"\0\0\0", b"\1\1\1", b"\2\2\2"]


def test_unsigned_data_is_refused(leaders):
    link = leaders[0]._links[1]
    link.put(0, 1, b"four")
    for index, part in enumerate(link.unsent):
        if bytes(part) == b"four":
            link.unsent[index] = memoryview(b"five")
    link.send()
    results = together(leaders, [[4, 4, 4]] * 3, [None, b"1111", None])
    assert isinstance(results[1], CollectiveAbortedError)
    assert "has a wrong signature" in str(results[1])


def test_abort_of_the_host_ends_the_wait(leaders):
    leaders[2]._arena.abort("somebody raised", 0)
    results = together(leaders, [[4, 4, 4]] * 3, [None, None, b"2222"])
    assert "somebody raised" in str(results[2])
