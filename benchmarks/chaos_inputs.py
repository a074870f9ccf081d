"""Sends invalid requests to a parallelized model, and compares errors and answers with those of the whole model."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.chaos_figures import Figure
from parallelformers_ng import parallelize
from parallelformers_ng.errors import GroupError, ParallelError
from parallelformers_ng.model.parallelized import deployment_of
from tests.zoo.decoders import gpt2

WIDTH, VOCABULARY, POSITIONS = 48, 131, 64  # of the tiny model

_DTYPES = (torch.int32, torch.float32, torch.float16, torch.bool, torch.complex64, torch.uint8, torch.int64)


def figures(count: int, seed: int) -> list[Figure]:
    """Run invalid requests, and count the unclear errors, the wrong answers and the restarts."""
    whole, model = gpt2(), parallelize(gpt2(), 2, workers={"device": "cpu", "timeout": 60})
    pids = deployment_of(model).pids
    outcomes: Counter[str] = Counter()
    for method, args, kwargs in tqdm(invalid_inputs(random.Random(seed), count), "inputs", count, disable=None):
        outcomes[_outcome(whole, model, method, args, kwargs)] += 1
    print(f"  outcomes {dict(outcomes)}", flush=True)
    restarted = int(deployment_of(model).pids != pids)
    model.deparallelize()
    unclear = count - outcomes["error"] - outcomes["right"]
    return [
        Figure("unclear errors and wrong answers", "sum", 0, [unclear]),
        Figure("restarts", "sum", 0, [restarted]),
    ]


def _outcome(whole: Any, model: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    try:
        answer = getattr(model, method)(*args, **kwargs)
    except (GroupError, ParallelError, ValueError, TypeError) as error:
        return "error" if str(error) else "error without words"
    except Exception as error:  # clear enough if the whole model raises the same error
        same = _error_of(whole, method, args, kwargs) == (type(error), str(error))
        return "error" if same else f"untyped {type(error).__name__}"
    with torch.no_grad():
        expected = getattr(whole, method)(*args, **kwargs)
    if method != "generate":
        answer, expected = answer.logits, expected.logits
    return "right" if torch.allclose(answer, expected, atol=1e-4, equal_nan=True) else "wrong"


def _error_of(whole: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[type, str] | None:
    try:
        getattr(whole, method)(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    return None


def invalid_inputs(source: random.Random, count: int) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yield method, arguments and keyword arguments of `count` requests; most requests are invalid."""
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
    """Return arguments with a tensor of random shape, data type and range, which may be empty or huge."""
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
    """Return arguments with an object that is not a tensor. Some objects cannot be sent to the workers."""
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
