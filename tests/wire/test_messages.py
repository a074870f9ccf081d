"""Tests messages: every value arrives unchanged, or raises an error that names its place."""

from __future__ import annotations

import math
import os
import random
import socket
import string
import sys
import threading
import types
from collections import Counter, OrderedDict, namedtuple

import numpy
import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutputWithPast

from parallelformers_ng.errors import NotPortableError
from parallelformers_ng.wire.frame import INLINE_BYTES, FileDescriptor, FrameKind, Handle
from parallelformers_ng.wire.message import encode
from parallelformers_ng.wire.transport import Channel
from tests.helpers.runtime_target import Reading

DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]
Point = namedtuple("Point", "x y")


def round_trip(value):
    ours, theirs = socket.socketpair()
    first, second = Channel(ours), Channel(theirs)
    sender = threading.Thread(target=first.send, args=(FrameKind.RESULT, 3, value))
    sender.start()
    try:
        kind, sequence, result = second.recv()
    finally:
        sender.join()
        first.close()
        second.close()
    assert (kind, sequence) == (FrameKind.RESULT, 3)
    return result


PLAIN = [
    *(None, True, False, 0, -1, 2**63, -(2**64) - 5, 3**2000, 1.5, -0.0, math.inf, -math.inf, "", "ünï\x00\ud800"),
    *(
        b"",
        b"\x00\xff",
        bytes(5000),
        1 + 2j,
        complex(math.inf, -0.0),
        [],
        (),
        {},
        set(),
        frozenset({1}),
        ...,
        range(1, 9, 2),
    ),
    *([1, [2, (3, [4])]], {1: "a", (2, "b"): [None], None: {b"k": {3}}}, OrderedDict([("z", 1), ("a", 2)])),
    *(slice(1, None, -2), torch.bfloat16, torch.qint8, torch.device("cuda:3"), torch.Size([2, 0, 5]), Point(1, [2])),
    *(numpy.float32(1.5), numpy.int64(-3), numpy.bool_(True), Counter("aab"), bytearray(b"xy")),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:30].encode("ascii", "replace").decode())
def test_values_arrive_equal_and_typed(value):
    result = round_trip(value)
    assert result == value
    assert type(result) is type(value)
    assert repr(result) == repr(value)


def test_nan_and_the_order_of_keys_survive():
    assert math.isnan(round_trip(math.nan))
    assert list(round_trip({"z": 1, "a": 2, 0: 3})) == ["z", "a", 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (200, 300)], ids=str)
def test_tensors_come_back_bit_for_bit(dtype, shape):
    size = math.prod(shape) * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    tensor = torch.randint(0, limit, (size,), dtype=torch.uint8).view(dtype).reshape(shape)
    result = round_trip(tensor)
    assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(result.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_views_conjugates_and_gradients_are_flattened_to_values():
    base = torch.randn(4, 6, dtype=torch.complex64)
    assert torch.equal(round_trip(base.t()[1:, ::2]), base.t()[1:, ::2])
    assert torch.equal(round_trip(base.conj()), base.conj())
    assert torch.equal(round_trip(torch.arange(9.0)[::3]), torch.arange(9.0)[::3])
    result = round_trip(torch.ones(3, requires_grad=True) * 2)
    assert not result.requires_grad
    assert type(round_trip(torch.nn.Parameter(torch.ones(3)))) is torch.nn.Parameter


@pytest.mark.parametrize("count", [4, 100_000])
def test_repeated_tensor_is_sent_once(count):
    tensor = torch.randn(count)
    encoded = encode([tensor, {"again": tensor}])
    assert len(encoded.outside) == 1
    first, second = round_trip([tensor, tensor])
    assert first is second


def test_received_tensors_are_private_and_hold_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    results = [round_trip(torch.ones(INLINE_BYTES)) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before
    results[0].zero_()
    assert all(result.sum() == INLINE_BYTES for result in results[1:])


@pytest.mark.parametrize("dtype", ["<f8", ">i4", "<U3", "|S2", "<M8[ns]", "<f2", "?", "<c16"])
def test_arrays(dtype):
    array = numpy.arange(6).astype(dtype if dtype != "?" else bool).reshape(2, 3)
    result = round_trip(array)
    assert result.dtype == array.dtype
    assert (result == array).all()
    assert result.flags.writeable
    assert round_trip(array[:0]).shape == (0, 3)


def test_model_outputs_and_dataclasses_come_back():
    output = CausalLMOutputWithPast(logits=torch.ones(2, 3), hidden_states=(torch.zeros(1), torch.ones(1)))
    result = round_trip(output)
    assert type(result) is CausalLMOutputWithPast
    assert list(result.keys()) == ["logits", "hidden_states"]
    assert result.loss is None
    assert torch.equal(result[0], output.logits)
    reading = round_trip(Reading("r", torch.arange(3)))
    assert type(reading) is Reading
    assert reading.values.tolist() == [0, 1, 2]


def test_other_objects_cross_by_value_tensors_outside():
    batch = BatchEncoding({"input_ids": torch.arange(100_000)})
    assert len(encode(batch).pickle) < 2000
    result = round_trip(batch)
    assert type(result) is BatchEncoding
    assert torch.equal(result["input_ids"], batch["input_ids"])
    offset = 5
    assert round_trip(lambda value: value + offset)(2) == 7
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(round_trip(sparse).to_dense(), torch.eye(3))


def test_unpicklable_values_are_named_with_place():
    class Processor:
        def __init__(self):
            self.lock = threading.Lock()

    kwargs = {"kwargs": {"logits_processor": [Processor()]}}
    with pytest.raises(NotPortableError, match=r"kwargs\['logits_processor'\]\[0\]\.lock \(a _thread\.lock\)"):
        encode(kwargs)
    endless: list = []
    endless.append(endless)
    assert (same := round_trip(endless))[0] is same
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotPortableError, match="nested too deep"):
        encode(deep)


def test_functions_of_the_script_cross_by_value():
    """Plain pickle stores only the names of such functions, and the receiver has another `__main__`."""
    seven = types.FunctionType((lambda: 7).__code__, {"__name__": "__main__"})
    seven.__module__ = "__main__"
    sys.modules["__main__"].seven = seven
    seven.__qualname__ = seven.__name__ = "seven"
    assert b"FunctionType" in bytes(encode(seven).pickle) or b"_make_function" in bytes(encode(seven).pickle)


def test_handles_cross():
    assert round_trip([Handle("cache", {"id": 7})]) == [Handle("cache", {"id": 7})]
    assert round_trip({Handle("cache", 7)}) == {Handle("cache", 7)}


def test_open_files_arrive_as_descriptors_of_the_receiver():
    fd = os.memfd_create("test")
    os.write(fd, b"content")
    result = round_trip({"file": FileDescriptor(fd), "tensor": torch.ones(INLINE_BYTES)})
    assert os.pread(result["file"].fd, 7, 0) == b"content"
    assert result["file"].fd != fd
    result["file"].close()
    os.close(fd)


def random_value(source: random.Random, depth: int):
    if depth == 0 or source.random() < 0.2:
        leaves = [
            None,
            True,
            source.randrange(-(2**70), 2**70),
            source.random(),
            b"x" * source.randrange(2000),
            1j,
            ...,
        ]
        return source.choice([*leaves, "".join(source.choices(string.printable, k=9)), torch.int8, range(3)])
    parts = [random_value(source, depth - 1) for _ in range(source.randrange(5))]
    return source.choice([list, tuple, lambda items: dict(enumerate(items))])(parts)


def test_random_trees_come_back_equal():
    source = random.Random(5)
    for _ in range(300):
        value = random_value(source, 6)
        assert round_trip(value) == value
