"""The codec: everything comes back as it was, and nothing but a ProtocolError comes of mangled bytes."""

from __future__ import annotations

import math
import os
import random
import socket
import string
import threading
from collections import Counter, OrderedDict, namedtuple

import numpy
import pytest
import torch
from runtime_target import Reading
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutputWithPast

from parallelformers_ng.errors import ChannelClosedError, NotPortableError, ProtocolError, RequestTimeoutError
from parallelformers_ng.runtime.frames import INLINE_TENSOR_BYTES, Frame, Kind, pack
from parallelformers_ng.runtime.leaves import DTYPE_NAMES, TENSOR_DTYPES
from parallelformers_ng.runtime.messages import FileDescriptor, Handle, decode, encode
from parallelformers_ng.runtime.transport import Channel

KEY = b"k" * 32
Point = namedtuple("Point", "x y")


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    first, second = Channel(ours, KEY), Channel(theirs, KEY)
    yield first, second
    first.close()
    second.close()


def round_trip(value, **hooks):
    ours, theirs = socket.socketpair()
    first, second = Channel(ours, KEY, replace=hooks.get("replace")), Channel(theirs, KEY, restore=hooks.get("restore"))
    sender = threading.Thread(target=first.send, args=(Kind.RESULT, 3, value))
    sender.start()
    try:
        kind, sequence, result = second.recv()
    finally:
        sender.join()
        first.close()
        second.close()
    assert (kind, sequence) == (Kind.RESULT, 3)
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
def test_values_come_back_equal_and_of_the_same_type(value):
    result = round_trip(value)
    assert result == value
    assert type(result) is type(value)
    assert repr(result) == repr(value)


def test_nan_and_the_order_of_keys_survive():
    assert math.isnan(round_trip(math.nan))
    assert list(round_trip({"z": 1, "a": 2, 0: 3})) == ["z", "a", 0]


@pytest.mark.parametrize("dtype", TENSOR_DTYPES.values(), ids=TENSOR_DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (200, 300)], ids=str)
def test_tensors_come_back_bit_for_bit(dtype, shape):
    size = math.prod(shape) * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    tensor = torch.randint(0, limit, (size,), dtype=torch.uint8).view(dtype).reshape(shape)
    result = round_trip(tensor)
    assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(result.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_views_conjugates_gradients_and_parameters_are_flattened_to_values():
    base = torch.randn(4, 6, dtype=torch.complex64)
    assert torch.equal(round_trip(base.t()[1:, ::2]), base.t()[1:, ::2])
    assert torch.equal(round_trip(base.conj()), base.conj())
    assert torch.equal(round_trip(torch.arange(9.0)[::3]), torch.arange(9.0)[::3])
    result = round_trip(torch.nn.Parameter(torch.ones(3)))
    assert type(result) is torch.Tensor
    assert not result.requires_grad


@pytest.mark.parametrize("count", [4, 100_000])
def test_one_tensor_seen_twice_is_sent_once(count):
    tensor = torch.randn(count)
    encoded = encode([tensor, {"again": tensor}], KEY)
    assert len(encoded.tensors) == 1
    first, second = round_trip([tensor, tensor])
    assert first is second


def test_received_tensors_are_private_and_hold_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    results = [round_trip(torch.ones(INLINE_TENSOR_BYTES)) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before
    results[0].zero_()
    assert all(result.sum() == INLINE_TENSOR_BYTES for result in results[1:])


@pytest.mark.parametrize("dtype", ["<f8", ">i4", "<U3", "|S2", "<M8[ns]", "<f2", "?", "<c16"])
def test_arrays(dtype):
    array = numpy.arange(6).astype(dtype if dtype != "?" else bool).reshape(2, 3)
    result = round_trip(array)
    assert result.dtype == array.dtype
    assert (result == array).all()
    assert result.flags.writeable
    assert round_trip(array[:0]).shape == (0, 3)


def test_model_outputs_and_dataclasses_go_field_by_field():
    output = CausalLMOutputWithPast(logits=torch.ones(2, 3), hidden_states=(torch.zeros(1), torch.ones(1)))
    encoded = encode(output, KEY)
    assert b'"p"' not in encoded.header
    result = round_trip(output)
    assert type(result) is CausalLMOutputWithPast
    assert list(result.keys()) == ["logits", "hidden_states"]
    assert result.loss is None
    assert torch.equal(result[0], output.logits)
    reading = round_trip(Reading("r", torch.arange(3)))
    assert type(reading) is Reading
    assert reading.values.tolist() == [0, 1, 2]


def test_other_objects_go_by_value_with_their_tensors_beside_the_pickle():
    batch = BatchEncoding({"input_ids": torch.arange(100_000)})
    encoded = encode(batch, KEY)
    assert len(encoded.header) < 2000
    result = round_trip(batch)
    assert type(result) is BatchEncoding
    assert torch.equal(result["input_ids"], batch["input_ids"])
    offset = 5
    assert round_trip(lambda value: value + offset)(2) == 7
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(round_trip(sparse).to_dense(), torch.eye(3))


def test_what_cannot_be_pickled_is_named_with_its_place():
    class Processor:
        def __init__(self):
            self.lock = threading.Lock()

    kwargs = {"kwargs": {"logits_processor": [Processor()]}}
    with pytest.raises(NotPortableError, match=r"kwargs\['logits_processor'\]\[0\]\.lock \(a _thread\.lock\)"):
        encode(kwargs, KEY)
    endless: list = []
    endless.append(endless)
    with pytest.raises(NotPortableError, match="contains itself"):
        encode(endless, KEY)
    with pytest.raises(NotPortableError, match="bits"):
        encode(1 << 100_000, KEY)


def test_hooks_replace_objects_by_handles_also_inside_pickles():
    class Cache:
        pass

    def replace(obj):
        return Handle("cache", {"id": 7}) if isinstance(obj, Cache) else obj

    class Holder:
        def __init__(self):
            self.cache = Cache()

    assert round_trip([Cache()], replace=replace) == [Handle("cache", {"id": 7})]
    assert round_trip([Cache()], replace=replace, restore=lambda handle: handle.payload["id"]) == [7]
    assert round_trip(Holder(), replace=replace).cache == Handle("cache", {"id": 7})


def test_open_files_arrive_as_descriptors_of_the_receiver():
    fd = os.memfd_create("test")
    os.write(fd, b"content")
    result = round_trip({"file": FileDescriptor(fd), "tensor": torch.ones(INLINE_TENSOR_BYTES)})
    assert os.pread(result["file"].fd, 7, 0) == b"content"
    assert result["file"].fd != fd
    result["file"].close()
    os.close(fd)


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


def test_fields_at_their_defaults_are_left_out_and_come_back():
    given = CausalLMOutputWithPast(logits=torch.ones(2))
    assert b"hidden_states" not in encode(given, KEY).header
    back = round_trip(given)
    assert type(back) is CausalLMOutputWithPast
    assert list(back) == ["logits"]
    assert vars(back).keys() == vars(given).keys()


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
        encoded = encode(value, KEY)
        blob = torch.frombuffer(bytearray(pack(Kind.RESULT, 0, encoded).data), dtype=torch.uint8)
        blob = blob[blob.numel() - encoded.size :] if encoded.size <= INLINE_TENSOR_BYTES else joined(encoded)
        assert decode(encoded.header, blob, [], KEY) == value


def joined(encoded):
    rows = [torch.nn.functional.pad(row, (0, -row.numel() % 64)) for row in encoded.tensors]
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
    b'[["s",["l"]],[]]',
    b'[["d",1],[]]',
    b'[["sl",1],[]]',
    b'[["r",0,1,0],[]]',
    b'[["i","0x' + b"f" * 40_000 + b'"],[]]',
    b"[" + b"9" * 9999 + b",[]]",
    b"[" * 5000,
    b"[" + b'["l",' * 500 + b"1" + b"]" * 500 + b",[]]",
    b'[["na","|O8",[1],false,"AAAAAAAAAAA="],[]]',
    b'[["na","|S9",[99999999999],false,""],[]]',
    b'[["dt","Tensor"],[]]',
    b'[["dv","moon:1"],[]]',
    b'[["p","00","gASVAAAA"],[]]',
    b'[["dc","antigravity:x","00",[],[]],[]]',
    b'[["sz",1.5],[]]',
    b'[["c","a","b"],[]]',
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


def test_mutated_frames_are_protocol_errors_and_leak_nothing(ends):
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


def test_every_dtype_of_torch_that_holds_plain_numbers_is_known():
    assert {torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn} <= DTYPE_NAMES.keys()
