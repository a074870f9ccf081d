"""Frames on the control channel: their tensors and descriptors, seals, and waits that end."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from parallelformers_ng.errors import ChannelClosedError, ProtocolError, RequestTimeoutError
from parallelformers_ng.runtime.encoder import encode
from parallelformers_ng.runtime.frames import INLINE_TENSOR_BYTES, Frame, Kind, pack
from parallelformers_ng.runtime.leaves import FileDescriptor
from parallelformers_ng.runtime.transport import Channel

KEY = b"k" * 32


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    first, second = Channel(ours, KEY), Channel(theirs, KEY)
    yield first, second
    first.close()
    second.close()


def test_frames_that_come_at_once_keep_their_own_tensors_and_descriptors(ends):
    files = [os.memfd_create(f"test-{number}") for number in range(3)]
    for number, fd in enumerate(files):
        os.write(fd, b"%d" % number)
    for number, fd in enumerate(files):
        ends[0].send(Kind.EVENT, number, "plain")
        tensor = torch.full((INLINE_TENSOR_BYTES if number == 1 else 3,), number)
        ends[0].send(Kind.EVENT, number, [number, FileDescriptor(fd), tensor])
    for number, fd in enumerate(files):
        os.close(fd)
        assert ends[1].recv() == (Kind.EVENT, number, "plain")
        _, _, (value, descriptor, tensor) = ends[1].recv()
        assert value == number == tensor[-1]
        assert os.pread(descriptor.fd, 1, 0) == b"%d" % number
        descriptor.close()
    assert not ends[1].has_more


def test_a_frame_with_an_unsealed_file_is_refused(ends):
    packed = pack(Kind.RESULT, 1, encode(torch.ones(INLINE_TENSOR_BYTES), KEY))
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


def test_waits_end_at_the_deadline_and_at_the_end_of_the_peer(ends):
    with pytest.raises(RequestTimeoutError):
        ends[1].recv(deadline=0.0)
    with pytest.raises(RequestTimeoutError):
        ends[0].send(Kind.RESULT, 1, "x" * (4 << 20), deadline=0.0)
    ends[1].close()
    with pytest.raises(ChannelClosedError):
        ends[0].recv()


def test_frames_that_are_not_decoded_give_their_descriptors_back(ends):
    before = len(os.listdir("/proc/self/fd"))
    ends[0].send(Kind.EVENT, 1, FileDescriptor(0))
    frame = ends[1].receive()
    assert isinstance(frame, Frame)
    frame.discard()
    assert len(os.listdir("/proc/self/fd")) == before
