"""Tests connections between hosts: peers prove that they know the key, and only signed records are read."""

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
    opened = Listener("127.0.0.1", KEY)
    yield opened
    opened.close()


def met(listener, key=KEY, purpose=b"test"):
    """Return both ends of a connection whose caller has this key: the caller's end or error, and the listener's end
    or error."""
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


def bytes_sent(ends, value):
    """Send a record with this value from the first end; return its bytes, unread by the second end."""
    ends[0].send(FrameKind.EVENT, 0, value)
    time.sleep(0.05)
    return ends[1].connection.recv(1 << 20)


def fed(data, session_of):
    """Return a channel that receives these bytes, with the keys of `session_of`."""
    ours, theirs = socket.socketpair()
    ours.sendall(data)
    ours.close()
    channel = SignedChannel(theirs, Session(b"", b""))
    channel._receiving, channel._sending = session_of._receiving, session_of._sending
    return channel


def test_tensors_and_files_cross_unchanged(ends):
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


def test_frame_in_parts_survives_ended_waits(ends):
    data = bytes_sent(ends, "the value")
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
    data = bytearray(bytes_sent(ends, "the value"))
    data[place] ^= 1
    with pytest.raises(ProtocolError, match="has a wrong signature"):
        fed(data, ends[1]).recv(time.monotonic() + PROMPTLY)


def test_replayed_or_missing_records_are_refused(ends):
    first, second = bytes_sent(ends, 1), bytes_sent(ends, 2)
    again = fed(first + first, ends[1])
    assert again.recv(time.monotonic() + PROMPTLY)[2] == 1
    with pytest.raises(ProtocolError):  # repeated
        again.recv(time.monotonic() + PROMPTLY)
    with pytest.raises(ProtocolError):  # left out: the failed record above has advanced the count
        fed(second, ends[0]).recv(time.monotonic() + PROMPTLY)
    with pytest.raises(ProtocolError):  # sent back to its sender
        fed(first, ends[0]).recv(time.monotonic() + PROMPTLY)


def test_record_cut_short_closes_the_connection(ends):
    with pytest.raises(ChannelClosedError):
        fed(bytes_sent(ends, "the value")[:-1], ends[1]).recv(time.monotonic() + PROMPTLY)


def test_keys_are_valid_for_one_connection(listener, ends):
    data = bytes_sent(ends, "the value")
    (theirs, (_, ours)) = met(listener)
    other = SignedChannel(*ours)
    with pytest.raises(ProtocolError):
        fed(data, other).recv(time.monotonic() + PROMPTLY)
    theirs[0].close()
    other.close()


def test_caller_with_another_key_is_dropped(listener):
    called, accepted = met(listener, OTHER)
    assert isinstance(called, (ProtocolError, ChannelClosedError))
    assert isinstance(accepted, RequestTimeoutError)


def test_listener_with_another_key_is_refused():
    """The caller also detects a listener that accepts any key."""
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


def test_strangers_do_not_block_peers(listener):
    """The strangers send nothing, close the connection, or send too few or wrong bytes."""
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


def test_late_answer_is_heard_by_next_accept(listener, monkeypatch):
    """An answer is late, for example, if a node's agent waits for the next group while the program computes for
    long."""
    early = []
    connection = socket.create_connection(listener.address)
    with pytest.raises(RequestTimeoutError):  # the stranger is greeted, but has not answered yet
        listener.accept(time.monotonic() + 0.2)
    monkeypatch.setattr(meeting.socket, "create_connection", lambda *_, **__: connection)
    thread = threading.Thread(target=lambda: early.append(call(listener.address, KEY, b"early", float("inf"))))
    thread.start()
    for stranger in listener._strangers.values():
        stranger.until = time.monotonic()  # its time is over; its answer has arrived or will
    assert select.select([stranger.connection], [], [], PROMPTLY)[0]
    purpose, (accepted, _) = listener.accept(time.monotonic() + PROMPTLY)
    thread.join()
    assert purpose == b"early"
    accepted.close()
    early[0][0].close()


def test_oldest_stranger_is_dropped_beyond_the_limit(listener, monkeypatch):
    monkeypatch.setattr(meeting, "_STRANGERS", 1)
    oldest = socket.create_connection(listener.address)
    with pytest.raises(RequestTimeoutError):
        listener.accept(time.monotonic() + 0.2)
    oldest.sendall(b"p")
    newest = socket.create_connection(listener.address)
    time.sleep(0.1)  # so the listener gets both at once
    called, (purpose, (connection, _)) = met(listener)
    assert purpose == b"test"
    for each in (connection, called[0], oldest, newest):
        each.close()


@pytest.mark.parametrize("address", ["0.0.0.0", "", "::"])
def test_nobody_listens_on_all_interfaces(address):
    with pytest.raises(ValueError, match="every interface"):
        Listener(address, KEY)
