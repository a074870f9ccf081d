"""Decoding in every way: greedily, with beams, and by chance with a seed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from parallelformers_ng.autopolicy.twin import Twin, length_options

_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "num_beams": 1},
    "beam": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "num_beams": 1},
}
_TOKENS = 4
_SEED = 5
_thread = threading.local()


def generate(twin: Twin, model: Any, decodings: set[str] | None = None) -> dict[str, torch.Tensor]:
    """Tokens of `model`, by way of decoding.

    Args:
        twin: whose inputs are decoded from.
        model: the twin's model, or a rank's share of it.
        decodings: the ways; None stands for all ways in which `model` generates from the inputs of its
            forward.
    """
    found: dict[str, torch.Tensor] = {}
    if not twin.runs_whole or not model.can_generate():
        return found
    inputs = {name: value for name, value in twin.probes[0].inputs.items() if not name.startswith("decoder_")}
    for name in _WAYS if decodings is None else sorted(decodings):
        try:
            tokens = _decode(model, inputs, _WAYS[name])
        except Exception:  # it may need more than its forward does, or know no beams
            if decodings is not None:
                raise
            continue
        if isinstance(tokens, torch.Tensor):
            found[name] = tokens
    return found


def _decode(model: Any, inputs: dict[str, Any], way: dict[str, Any]) -> Any:
    given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    _thread.generator = torch.Generator().manual_seed(_SEED)
    return model.generate(**given, **way, **length_options(model, _TOKENS))


@contextmanager
def draws_of_each_thread() -> Iterator[None]:
    """While it is entered, sampling draws from a generator of the thread's own: ranks are threads here, and torch has
    one generator for all of them."""
    multinomial = torch.multinomial

    def draw(input: torch.Tensor, num_samples: int, replacement: bool = False) -> torch.Tensor:
        return multinomial(input, num_samples, replacement, generator=_thread.generator)

    with mock.patch.object(torch, "multinomial", draw):
        yield
