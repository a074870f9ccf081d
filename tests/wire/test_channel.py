"""Tests frames on the control channel: tensors, descriptors, seals, and deadlines of waits."""

from __future__ import annotations

import array
import os
import socket
import threading
import time

import pytest
import torch

from parallelformers_ng.errors import ChannelClosedError, ProtocolError, RequestTimeoutError
from parallelformers_ng.wire.frame import INLINE_BYTES, FileDescriptor, Frame, FrameKind
from parallelformers_ng.wire.message import encode, pack
from parallelformers_ng.wire.transport import Channel


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    first, second = Channel(ours), Channel(theirs)
    yield first, second
    first.close()
    second.close()


def test_frames_together_keep_their_tensors_and_descriptors(ends):
    files = [os.memfd_create(f"test-{number}") for number in range(3)]
    for number, fd in enumerate(files):
        os.write(fd, b"%d" % number)
    for number, fd in enumerate(files):
        ends[0].send(FrameKind.EVENT, number, "plain")
        tensor = torch.full((INLINE_BYTES if number == 1 else 3,), number)
        ends[0].send(FrameKind.EVENT, number, [number, FileDescriptor(fd), tensor])
    for number, fd in enumerate(files):
        os.close(fd)
        assert ends[1].recv() == (FrameKind.EVENT, number, "plain")
        _, _, (value, descriptor, tensor) = ends[1].recv()
        assert value == number == tensor[-1]
        assert os.pread(descriptor.fd, 1, 0) == b"%d" % number
        descriptor.close()
    assert not ends[1].has_more


def test_a_frame_with_an_unsealed_file_is_refused(ends):
    packed = pack(FrameKind.RESULT, 1, encode(torch.ones(INLINE_BYTES)))
    plain = os.memfd_create("unsealed")
    os.truncate(plain, 1 << 20)
    packed.fds[-1] = plain
    ends[0].send_packed(packed)
    os.close(plain)
    packed.close()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError, match="seals"):
        ends[1].recv()
    assert len(os.listdir("/proc/self/fd")) == before


def _fill(channel):
    for number in range(1000):  # until the socket is full
        channel.send(FrameKind.RESULT, number, "x" * (32 << 10), deadline=0.0)


def test_waits_end_at_deadline_or_with_peer(ends):
    with pytest.raises(RequestTimeoutError):
        ends[1].recv(deadline=0.0)
    with pytest.raises(RequestTimeoutError):
        _fill(ends[0])
    ends[1].close()
    with pytest.raises(ChannelClosedError):
        ends[0].recv()


def test_undecoded_frames_give_their_descriptors_back(ends):
    before = len(os.listdir("/proc/self/fd"))
    ends[0].send(FrameKind.EVENT, 1, FileDescriptor(0))
    frame = ends[1].receive()
    assert isinstance(frame, Frame)
    frame.discard()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("blocking", [False, True])
def test_spinning_ends_with_a_frame_or_timeout(ends, blocking):
    ends[1].connection.setblocking(blocking)
    start = time.monotonic()
    assert not ends[1].spin(start + 0.2)
    assert 0.2 <= time.monotonic() - start < 5
    soon = threading.Timer(0.05, ends[0].send, (FrameKind.EVENT, 1, "it"))
    soon.start()
    assert ends[1].spin(start + 60)
    soon.join()
    for name in ("second", "third"):
        ends[0].send(FrameKind.EVENT, 1, name)
    assert [ends[1].recv()[2] for _ in range(2)] == ["it", "second"]
    assert ends[1].spin(start)  # returns at once for a frame already read
    assert ends[1].recv()[2] == "third"


def test_idle_channel_sleeps_after_spinning(ends):
    start, busy = time.monotonic(), time.thread_time()
    threading.Timer(0.5, ends[0].send, (FrameKind.EVENT, 1, "it")).start()
    assert not ends[1].spin(start + 0.1)
    assert ends[1].recv()[2] == "it"
    assert time.monotonic() - start >= 0.5
    assert time.thread_time() - busy < 0.3


def test_frame_in_parts_is_assembled(ends):
    """The frame's descriptor arrives, too, for any part of the frame that is readable at the first poll."""
    file = os.memfd_create("test")
    os.write(file, b"content")
    packed = pack(FrameKind.EVENT, 1, encode([FileDescriptor(file), "x" * 500, torch.arange(9)]))
    for cut in (1, 31, 32, 33, 400, len(packed.data) - 1):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", packed.fds))]
        ends[0].connection.sendmsg([packed.data[:cut]], rights)
        assert ends[1].spin(0.0)
        ends[0].connection.send(packed.data[cut:])
        descriptor, text, tensor = ends[1].recv()[2]
        assert (text, tensor.tolist()) == ("x" * 500, list(range(9)))
        assert os.pread(descriptor.fd, 7, 0) == b"content"
        descriptor.close()
        assert not ends[1].spin(0.0)
    os.close(file)


def test_unannounced_descriptors_are_refused_and_closed(ends):
    before = len(os.listdir("/proc/self/fd"))
    packed = pack(FrameKind.EVENT, 1, encode("plain"))
    packed.fds.append(0)
    ends[0].send_packed(packed)
    with pytest.raises(ProtocolError, match="more file descriptors"):
        ends[1].receive()
    assert len(os.listdir("/proc/self/fd")) == before
