"""Traffic between hosts: callers must know the key, and unsigned bytes are not read."""

from __future__ import annotations

import os
import select
import socket
import threading
import time

import pytest
import torch

from parallelformers_ng.errors import ChannelClosedError, ParallelError, ProtocolError, RequestTimeoutError
from parallelformers_ng.wire import meeting
from parallelformers_ng.wire.frame import INLINE_BYTES, FileDescriptor, FrameKind
from parallelformers_ng.wire.meeting import Listener, call
from parallelformers_ng.wire.signed import HEAD_BYTES, Session, SignedChannel
from tests.helpers.patience import PROMPTLY

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def listener():
    made = Listener("127.0.0.1", KEY)
    yield made
    made.close()


def met(listener, key=KEY, purpose=b"test"):
    """Both ends of a connection whose caller has this key: (the caller's, or its error; what the listener accepts)."""
    called = []

    def caller():
        try:
            called.append(call(listener.address, key, purpose, time.monotonic() + PROMPTLY))
        except ParallelError as error:
            called.append(error)

    thread = threading.Thread(target=caller)
    thread.start()
    try:
        accepted = listener.accept(time.monotonic() + (PROMPTLY if key == KEY else 0.2))
    except RequestTimeoutError as error:
        accepted = error
    thread.join()
    return called[0], accepted


@pytest.fixture
def ends(listener):
    theirs, (purpose, ours) = met(listener)
    assert purpose == b"test"
    channels = SignedChannel(*ours), SignedChannel(*theirs)
    yield channels
    for channel in channels:
        channel.close()


def sent(ends, value):
    """The bytes of a record with this value, which the first end sends and the second does not read."""
    ends[0].send(FrameKind.EVENT, 0, value)
    time.sleep(0.05)
    return ends[1].connection.recv(1 << 20)


def fed(data, session_of):
    """A channel that finds these bytes, with the keys that `session_of` has."""
    ours, theirs = socket.socketpair()
    ours.sendall(data)
    ours.close()
    channel = SignedChannel(theirs, Session(b"", b""))
    channel._receiving, channel._sending = session_of._receiving, session_of._sending
    return channel


def test_tensors_of_any_size_and_files_cross_as_what_they_hold(ends):
    file = os.memfd_create("test")
    os.write(file, b"what it holds")
    large = torch.randn(INLINE_BYTES)
    ends[0].send(FrameKind.EVENT, 3, {"large": large, "file": FileDescriptor(file), "small": torch.arange(3)})
    os.close(file)
    ends[0].send(FrameKind.EVENT, 4, [large[:0], b"x" * 2000])
    kind, sequence, value = ends[1].recv(time.monotonic() + PROMPTLY)
    assert (kind, sequence) == (FrameKind.EVENT, 3)
    assert torch.equal(value["large"], large)
    assert value["small"].tolist() == [0, 1, 2]
    assert os.pread(value["file"].fd, 100, 0) == b"what it holds"
    value["file"].close()
    _, _, (empty, text) = ends[1].recv(time.monotonic() + PROMPTLY)
    assert (empty.numel(), text) == (0, b"x" * 2000)


def test_a_frame_that_comes_in_parts_after_a_wait_that_ended_is_taken_whole(ends):
    data = sent(ends, "the value")
    ours, theirs = socket.socketpair()
    channel = SignedChannel(theirs, Session(b"", b""))
    channel._receiving = ends[1]._receiving
    for end in (5, HEAD_BYTES + 3):
        ours.sendall(data[:end])
        data = data[end:]
        with pytest.raises(RequestTimeoutError):
            channel.recv(time.monotonic() + 0.05)
    ours.sendall(data)
    assert channel.recv(time.monotonic() + PROMPTLY)[2] == "the value"
    ours.close()
    channel.close()


@pytest.mark.parametrize("place", [0, HEAD_BYTES - 1, HEAD_BYTES, -33, -1])
def test_a_changed_record_is_not_read(ends, place):
    data = bytearray(sent(ends, "the value"))
    data[place] ^= 1
    with pytest.raises(ProtocolError, match="not what the other host sent"):
        fed(data, ends[1]).recv(time.monotonic() + PROMPTLY)


def test_a_record_repeated_left_out_sent_back_or_cut_short_is_not_read(ends):
    first, second = sent(ends, 1), sent(ends, 2)
    again = fed(first + first, ends[1])
    assert again.recv(time.monotonic() + PROMPTLY)[2] == 1
    with pytest.raises(ProtocolError):  # repeated
        again.recv(time.monotonic() + PROMPTLY)
    with pytest.raises(ProtocolError):  # left out: the count has gone on with the failure above
        fed(second, ends[0]).recv(time.monotonic() + PROMPTLY)
    with pytest.raises(ProtocolError):  # to who sent it
        fed(first, ends[0]).recv(time.monotonic() + PROMPTLY)


def test_a_record_that_is_cut_short_is_the_end_of_the_connection(ends):
    with pytest.raises(ChannelClosedError):
        fed(sent(ends, "the value")[:-1], ends[1]).recv(time.monotonic() + PROMPTLY)


def test_keys_hold_for_one_connection(listener, ends):
    data = sent(ends, "the value")
    (theirs, (_, ours)) = met(listener)
    other = SignedChannel(*ours)
    with pytest.raises(ProtocolError):
        fed(data, other).recv(time.monotonic() + PROMPTLY)
    theirs[0].close()
    other.close()


def test_who_has_another_key_is_left_and_finds_it_out(listener):
    called, accepted = met(listener, OTHER)
    assert isinstance(called, (ProtocolError, ChannelClosedError))
    assert isinstance(accepted, RequestTimeoutError)


def test_who_listens_with_another_key_is_refused_by_the_caller():
    """One that lets anybody in is found out as well."""
    server = socket.create_server(("127.0.0.1", 0))

    def pretend():
        connection, _ = server.accept()
        connection.sendall(b"parallelformers_ng/1 " + b"n" * 32)
        connection.recv(1000)
        connection.sendall(b"p" * 32)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(ProtocolError, match="does not know the key"):
        call(server.getsockname(), KEY, b"test", time.monotonic() + PROMPTLY)
    thread.join()
    server.close()


def test_strangers_keep_nobody_out(listener):
    """Callers that say nothing, that go, that say too little or anything else."""
    strangers = [socket.create_connection(listener.address) for _ in range(20)]
    for number, stranger in enumerate(strangers):
        if number % 3 == 1:
            stranger.sendall(b"GET / HTTP/1.1\r\n" * (number + 1))
        elif number % 3 == 2:
            stranger.close()
    called, (purpose, (connection, _)) = met(listener)
    assert purpose == b"test"
    connection.close()
    called[0].close()
    for stranger in strangers:
        stranger.close()


def test_who_answers_while_nobody_listens_is_heard_by_the_next_who_does(listener, monkeypatch):
    """Like the agent of a node that waits for the next group, while the program computes longer than the time for a
    proof."""
    early = []
    connection = socket.create_connection(listener.address)
    with pytest.raises(RequestTimeoutError):  # it is greeted, and has not answered yet
        listener.accept(time.monotonic() + 0.2)
    monkeypatch.setattr(meeting.socket, "create_connection", lambda *_, **__: connection)
    thread = threading.Thread(target=lambda: early.append(call(listener.address, KEY, b"early", float("inf"))))
    thread.start()
    for stranger in listener._strangers.values():
        stranger.until = time.monotonic()  # its patience is over, and its answer is there or will be
    assert select.select([stranger.connection], [], [], PROMPTLY)[0]
    purpose, (accepted, _) = listener.accept(time.monotonic() + PROMPTLY)
    thread.join()
    assert purpose == b"early"
    accepted.close()
    early[0][0].close()


def test_one_stranger_too_many_has_the_oldest_left_though_it_speaks(listener, monkeypatch):
    monkeypatch.setattr(meeting, "_STRANGERS", 1)
    oldest = socket.create_connection(listener.address)
    with pytest.raises(RequestTimeoutError):
        listener.accept(time.monotonic() + 0.2)
    oldest.sendall(b"p")
    newest = socket.create_connection(listener.address)
    time.sleep(0.1)  # the listener finds both at once
    called, (purpose, (connection, _)) = met(listener)
    assert purpose == b"test"
    for each in (connection, called[0], oldest, newest):
        each.close()


@pytest.mark.parametrize("address", ["0.0.0.0", "", "::"])
def test_nobody_listens_on_all_interfaces(address):
    with pytest.raises(ValueError, match="every interface"):
        Listener(address, KEY)
