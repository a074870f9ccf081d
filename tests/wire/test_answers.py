"""Tests that answers leave the program's classes alone, and that a kept tensor keeps only its own memory."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.wire.frame import FrameKind
from parallelformers_ng.wire.message import decode, encode, pack
from parallelformers_ng.wire.transport import Channel
from tests.zoo.decoders import decoder

pytestmark = pytest.mark.promise("answers")

SCRIPT = """
import abc, collections, dataclasses, enum, sys, typing
import torch
from transformers import LlamaForCausalLM
from parallelformers_ng import parallelize
from tests.zoo.decoders import decoder

log, SCALE = [], 1.0

class Meta(type):
    def __new__(meta, name, bases, space):
        return super().__new__(meta, name, bases, {**space, "by_meta": name})

class Result(metaclass=Meta):
    made = []
    limit = 1
    class Inner:
        def __init__(self, v): self.v = v
    def __init__(self, v): self.v = v; log.append("made")
    def scaled(self): return self.v * SCALE

class Abstract(abc.ABC):
    @abc.abstractmethod
    def value(self): ...

class Concrete(Abstract):
    def value(self): return 3

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Data:
    n: int = 0

class Pair(typing.NamedTuple):
    left: int
    right: int

Point = collections.namedtuple("Point", "x y")

def double(v): return 2 * v * SCALE

class Model(LlamaForCausalLM):
    def forward(self, input_ids=None, **k):
        made = Result(2.0)
        return {"result": made, "inner": Result.Inner(1), "color": Color.RED, "data": Data(4), "pair": Pair(1, 2),
                "point": Point(3, 4), "concrete": Concrete(), "double": double, "class": Result,
                "made_there": type("There", (), {"n": 1})()}

model = Model(decoder("Llama").config).eval()
before = {cls: dict(vars(cls)) for cls in (Result, Result.Inner, Color, Data, Pair, Point, Concrete, Abstract)}
parallelize(model, 2, workers={"device": "cpu"})
Result.limit = 7
Result.made.append(1)
SCALE = 3.0
for _ in range(2):
    out = model(torch.tensor([[1, 5, 9]]))
    assert type(out["result"]) is Result and out["class"] is Result and out["result"].scaled() == 6.0
    assert type(out["inner"]) is Result.Inner and out["color"] is Color.RED and out["data"] == Data(4)
    assert type(out["pair"]) is Pair and type(out["point"]) is Point and isinstance(out["concrete"], Abstract)
    assert out["double"] is double and double(1) == 6.0
    assert out["made_there"].n == 1
assert Result.limit == 7 and Result.made == [1], (Result.limit, Result.made)
for cls, attributes in before.items():
    for name, value in vars(cls).items():
        if name not in ("limit", "__abstractmethods__", "_abc_impl", "__weakref__", "__dict__", "__slotnames__"):
            assert attributes.get(name) is value, (cls, name)
log.clear(); Result(1); assert log == ["made"]
model.deparallelize()
print("own")
"""


def test_classes_and_functions_stay_the_scripts_own() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "own", done.stderr[-3000:]


def through(value: Any, apart: bool = True) -> Any:
    """Return the value after a trip through an answer."""
    import socket

    writer, reader = (Channel(end, blocking=True) for end in socket.socketpair(socket.AF_UNIX))
    packed = pack(FrameKind.RESULT, 1, encode(value), apart=apart)
    writer.send_packed(packed)
    packed.close()
    received = decode(reader.receive())
    writer.close(), reader.close()
    return received


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("size", [10, 30_000, 60_000, 500_000])
def test_a_kept_tensor_keeps_its_own_bytes(size: int, apart: bool) -> None:
    original = [torch.randn(size) for _ in range(3)] + [
        torch.arange(5),
        torch.empty(0, 3),
        torch.ones(size // 5).bool(),
    ]
    before = memory_of_messages()
    received = through(original, apart)
    assert all(torch.equal(one, other) for one, other in zip(original, received, strict=True))
    for tensor in received:
        file = io.BytesIO()
        torch.save(tensor, file)
        assert file.tell() < tensor.nbytes + 3000
    kept = received[1]
    del received, tensor
    assert memory_of_messages() - before <= max(kept.nbytes, 1 << 16) + 8192
    kept.add_(1)  # the memory is writable
    assert torch.equal(kept, original[1] + 1)


def memory_of_messages() -> int:
    """Return the bytes of shared memory that this process maps for messages."""
    inodes = dict[str, int]()
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:parallelformers_ng (deleted)" in line:
                begin, _, end = line.split()[0].partition("-")
                inodes[line.split()[4]] = max(inodes.get(line.split()[4], 0), int(end, 16) - int(begin, 16))
    return sum(inodes.values())


def test_a_single_tensor_is_not_copied() -> None:
    before = memory_of_messages()
    received = through({"logits": torch.randn(1 << 20)})
    assert memory_of_messages() - before >= received["logits"].nbytes


def test_many_large_tensors_need_few_descriptors() -> None:
    original = [torch.full((40_000,), float(number)) for number in range(300)]
    assert len(pack(FrameKind.RESULT, 1, encode(original), apart=True).fds) < 80
    received = through(original)
    assert all(torch.equal(one, other) for one, other in zip(original, received, strict=True))


def test_outputs_of_a_model_that_are_kept(groups) -> None:
    with torch.no_grad(), parallelize(decoder("Llama"), workers=groups(2)) as model:
        ids = torch.randint(5, 90, (8, 60))
        before = memory_of_messages()
        output = model(ids, output_hidden_states=True, use_cache=False)
        want = [state.clone() for state in output.hidden_states]
        kept = output.hidden_states[1]
        del output
        assert torch.equal(kept, want[1])
        assert memory_of_messages() - before <= kept.nbytes + 8192


class Tone(enum.Enum):
    LOW = 1


@dataclasses.dataclass
class Made:
    n: int


class Both(NamedTuple):
    n: int


Plain = collections.namedtuple("Plain", "n")


def test_returned_class_keeps_meanwhile_changes() -> None:
    """The pickle of a class by value is read in the process that wrote it, as when a rank returns the class."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        message = encode([Tone.LOW, Made(1), Both(2), Plain(3), Made])
        Made.limit = 5
        values = decode_of(message)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert values == [Tone.LOW, Made(1), Both(2), Plain(3), Made]
    assert values[0] is Tone.LOW
    assert Made.limit == 5


def decode_of(message: Any) -> Any:
    import pickle

    return pickle.loads(bytes(message.pickle))
