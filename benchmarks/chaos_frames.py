"""Control frames with flipped, lost and added bytes, received as the parent would receive them."""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter
from typing import Any

import torch
from tqdm import tqdm
from transformers.modeling_outputs import CausalLMOutputWithPast

from benchmarks.chaos_figures import Figure
from parallelformers_ng.errors import ChannelClosedError, ProtocolError, RequestTimeoutError
from parallelformers_ng.wire.encoder import encode, pack
from parallelformers_ng.wire.format import Handle, Kind
from parallelformers_ng.wire.transport import Channel

_KEY, _OTHER_KEY = b"k" * 32, b"o" * 32
_sprung: list[int] = []


class Trap:
    """Its pickle calls a function of this module when it is read."""

    def __reduce__(self) -> Any:
        return _spring, ()


def _spring() -> None:
    _sprung.append(1)


def figures(count: int, seed: int) -> list[Figure]:
    """Mutated frames give a ProtocolError, or a value; their code never runs."""
    outcomes, ran, descriptors = mutated_frames(random.Random(seed), count)
    print(f"  outcomes {dict(outcomes)}", flush=True)
    crashes = sum(number for name, number in outcomes.items() if name.startswith("crash"))
    return [
        Figure("errors of another kind", "sum", 0, [crashes]),
        Figure("code run", "sum", 0, [ran]),
        Figure("descriptors left", "sum", 0, [descriptors]),
    ]


def mutated_frames(source: random.Random, count: int) -> tuple[Counter[str], int, int]:
    """Send mutated frames over a socket and read them.

    Returns:
        How many ended how ("value", "ProtocolError", …, "crash …" for errors of no known kind), how often code in a
        frame ran, and how many descriptors are left.
    """
    originals = [pack(Kind.RESULT, 1, encoded).data for encoded in _samples()]
    outcomes: Counter[str] = Counter()
    _sprung.clear()
    before = len(os.listdir("/proc/self/fd"))
    for _ in tqdm(range(count), "frames", disable=None):
        outcomes[_receive(_mutate(bytearray(source.choice(originals)), source))] += 1
    return outcomes, len(_sprung), len(os.listdir("/proc/self/fd")) - before


def _samples() -> list[Any]:
    plain = {
        "tensor": torch.arange(40, dtype=torch.float32).reshape(5, 8),
        "output": CausalLMOutputWithPast(logits=torch.ones(2)),
        "rest": [1, 2.5, "text", b"bytes", {1, 2}, slice(1, 2), torch.float16, 3**99],
        "handle": Handle("cache", 1),
    }
    # Signed with another group's key, as by somebody who can write to the socket and has not the key.
    return [encode({"result": plain}, _KEY), encode({"result": Trap()}, _OTHER_KEY), encode({"event": 1}, _KEY)]


def _mutate(data: bytearray, source: random.Random) -> bytearray:
    for _ in range(source.choice([1, 1, 2, 8])):
        # Half of the changes hit the fixed part, which says how much memory the rest takes.
        place = source.randrange(min(len(data), 32) if source.random() < 0.5 else len(data))
        data[place] = source.choice([source.randrange(256), data[place] ^ (1 << source.randrange(8))])
    if source.random() < 0.1:
        del data[source.randrange(len(data)) :]
    elif source.random() < 0.1:
        data += source.randbytes(source.randrange(1, 64))
    return data


def _receive(data: bytearray) -> str:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs, _KEY)
    try:
        with ours:
            ours.sendall(data)
        channel.recv(time.monotonic() + 1.0)
    except (ProtocolError, ChannelClosedError, RequestTimeoutError) as error:
        return type(error).__name__
    except Exception as error:  # this is what the experiment looks for
        return f"crash {type(error).__name__}"
    finally:
        channel.close()
    return "value"
