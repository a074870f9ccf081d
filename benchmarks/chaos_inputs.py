"""Requests that no model can serve, or hardly any."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

WIDTH, VOCABULARY, POSITIONS = 48, 131, 64  # of the tiny model

_DTYPES = (torch.int32, torch.float32, torch.float16, torch.bool, torch.complex64, torch.uint8, torch.int64)


def invalid_inputs(source: random.Random, count: int) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Method, arguments and keyword arguments of `count` requests, most of them invalid."""
    for _ in range(count):
        kwargs: dict[str, Any] = {}
        method = source.choice(["forward", "generate"])
        if method == "generate":
            kwargs |= {"max_new_tokens": 3, "do_sample": False}
        args, more = source.choice(_MAKERS)(source)
        yield method, args, kwargs | more


def _ids(source: random.Random) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (source.randrange(1, 4), source.randrange(2, 9)))


def _random_ids(source: random.Random) -> Any:
    """Of any shape, dtype and range; also empty, and huge."""
    shape = [source.choice([0, 1, 2, 7, 65, 1000]) for _ in range(source.randrange(0, 5))]
    if torch.Size(shape).numel() > 1 << 22:
        shape = [1, 1 << 22]
    values = torch.randint(-5, 300, shape)
    return (values.to(source.choice(_DTYPES)),), {}


def _embeddings(source: random.Random) -> Any:
    shape = [source.choice([0, 1, 2, 3]), source.choice([1, 2, 70]), source.choice([WIDTH, WIDTH, 1, 47, 0])]
    values = torch.full(shape, source.choice([torch.nan, torch.inf, 0.0, 1e30]))
    return (), {"inputs_embeds": values.to(source.choice([torch.float32, torch.float64, torch.int64]))}


def _mask(source: random.Random) -> Any:
    shape = [source.randrange(0, 4) for _ in range(source.randrange(0, 5))]
    return (_ids(source),), {"attention_mask": torch.ones(shape, dtype=source.choice(_DTYPES))}


def _unknown(source: random.Random) -> Any:
    name = source.choice(["input_idz", "max_lenght", "__class__", "past", "temperatur"])
    return (_ids(source),), {name: source.choice([1, None, "x", [1], _ids(source)])}


def _objects(source: random.Random) -> Any:
    """Things that are no tensors; some cannot even be sent."""
    thing = source.choice([None, "text", 3, [1, 2], {"a": 1}, object(), b"\0" * 4096, threading.Lock(), open, 10**400])
    name = source.choice(["input_ids", "attention_mask", "position_ids", "inputs_embeds"])
    return (), {"input_ids": _ids(source), name: thing}


def _positions(source: random.Random) -> Any:
    return (_ids(source),), {"position_ids": torch.randint(-3, 2 * POSITIONS, (1, source.randrange(1, 9)))}


def _settings(source: random.Random) -> Any:
    name, value = source.choice(
        [
            ("use_cache", "maybe"), ("output_attentions", []), ("past_key_values", 7), ("past_key_values", ((1, 2),)),
            ("labels", torch.full((1, 1), 10**9)), ("token_type_ids", torch.ones(9, 9, 9)), ("timeout", -1),
            ("timeout", "soon"), ("return_dict", 3), ("logits_to_keep", -10**6), ("cache_position", "here"),
        ]
    )  # fmt: skip
    return (_ids(source),), {name: value}


_MAKERS: list[Callable[[random.Random], Any]] = [
    *(_random_ids, _embeddings, _mask, _unknown, _objects, _positions, _settings),
    lambda source: ((), {}),
    lambda source: ((_ids(source), _ids(source), _ids(source), _ids(source)), {}),
]
