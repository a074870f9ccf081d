"""The codec: nothing but a ProtocolError comes of mangled bytes."""

from __future__ import annotations

import os
import random
import socket
from collections import Counter, namedtuple

import numpy
import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from parallelformers_ng.errors import ChannelClosedError, ProtocolError
from parallelformers_ng.hooks.pickling import PackedHooks
from parallelformers_ng.wire.decoder import decode
from parallelformers_ng.wire.encoder import encode, pack
from parallelformers_ng.wire.format import Handle, Kind
from parallelformers_ng.wire.transport import Channel

KEY = b"k" * 32
Point = namedtuple("Point", "x y")


def joined(encoded):
    rows = [torch.nn.functional.pad(row, (0, -row.numel() % 64)) for _, row in encoded.tensors]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)


def sample():
    return {
        "tensor": torch.arange(40, dtype=torch.float32).reshape(5, 8),
        "output": CausalLMOutputWithPast(logits=torch.ones(2)),
        "object": Counter("abc"),
        "rest": [1, 2.5, "text", b"bytes", {1, 2}, slice(1, 2), numpy.arange(3), torch.float16, 3**99, Point(1, 2)],
        "handle": Handle("cache", 1),
    }


def test_mutated_headers_are_refused_or_harmless():
    source = random.Random(11)
    encoded = encode(sample(), KEY)
    blob = joined(encoded)
    refused = 0
    for _ in range(2000):
        header, mutated = bytearray(encoded.header), blob.clone()
        for _ in range(source.choice([1, 1, 2, 8])):
            header[source.randrange(len(header))] = source.choice([*range(256), *b'[]",0129'])
        mutated[source.randrange(mutated.numel())] ^= 1 << source.randrange(8)
        if source.random() < 0.2:
            header = header[: source.randrange(len(header))]
        try:
            decode(bytes(header), mutated, [], KEY)
        except ProtocolError:
            refused += 1
    assert refused > 1000


HOSTILE = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[1]",
    b'[{"a":1},[]]',
    b"[[],[]]",
    b'"a" ',
    b'"a"[]',
    b"1",
    b"[[[]],[]]",
    b'[["nope"],[]]',
    b'[["T",0],[]]',
    b'[["T",-1],[["float32",[1],0]]]',
    b'[["T",true],[["float32",[1],0]]]',
    b'[1,[["float32",[4611686018427387904,4],0]]]',
    b'[1,[["float32",[-1],0]]]',
    b'[1,[["float32",[1],4]]]',
    b'[1,[["qint8",[1],0]]]',
    b'[["fd",0],[]]',
    b'[["d",1],[]]',
    b'[["d",["l"],1],[]]',
    b"[" + b"9" * 9999 + b",[]]",
    b"[" * 5000,
    b"[" + b'["l",' * 500 + b"1" + b"]" * 500 + b",[]]",
    b'[["dt","Tensor"],[]]',
    b'[["p","00","gASVAAAA"],[]]',
    b'[["dc","antigravity:x","00",[],[]],[]]',
]


@pytest.mark.parametrize("header", HOSTILE, ids=lambda header: repr(header)[:40])
def test_hostile_headers_are_protocol_errors(header):
    with pytest.raises(ProtocolError):
        decode(header, torch.zeros(64, dtype=torch.uint8), [], KEY)


def test_a_pickle_with_another_key_is_not_read(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    encoded = encode(Trap(), b"other key")
    with pytest.raises(ProtocolError, match="signature of a pickle"):
        decode(encoded.header, joined(encoded), [], KEY)
    assert not (tmp_path / "sprung").exists()
    with pytest.raises(ProtocolError, match="before there was a key"):
        decode(encoded.header, joined(encoded), [], None)


def test_hooks_with_another_key_are_not_read():
    """Their bytes are code, so they travel as a pickle does."""
    encoded = encode(PackedHooks(b"code", []), b"other key")
    with pytest.raises(ProtocolError, match="signature of a pickle"):
        decode(encoded.header, joined(encoded), [], KEY)


def test_mutated_frames_are_protocol_errors_and_leak_nothing():
    source = random.Random(3)
    data = pack(Kind.RESULT, 1, encode(sample(), KEY)).data
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(300):
        mutated = bytearray(data)
        for _ in range(source.choice([1, 2, 5])):
            mutated[source.randrange(48)] = source.randrange(256)
        ours, theirs = socket.socketpair()
        channel = Channel(theirs, KEY)
        ours.sendall(mutated)
        ours.close()
        try:
            channel.recv()
        except (ProtocolError, ChannelClosedError):
            pass
        finally:
            channel.close()
    assert len(os.listdir("/proc/self/fd")) == before
