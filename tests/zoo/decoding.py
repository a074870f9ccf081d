"""Generates in several ways: greedy, with beams, and sampled with a seed."""

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
    """Return the tokens of `model` by way of decoding.

    Args:
        twin: twin that provides the prompts.
        model: the twin's model, or a rank's share of it.
        decodings: names of the ways; None tries all, and keeps the ways in which `model` generates.
    """
    tokens_by_way: dict[str, torch.Tensor] = {}
    if not twin.runs_whole or not model.can_generate():
        return tokens_by_way
    inputs = {name: value for name, value in twin.probes[0].inputs.items() if not name.startswith("decoder_")}
    for name in _WAYS if decodings is None else sorted(decodings):
        try:
            tokens = _decode(model, inputs, _WAYS[name])
        except Exception:  # it may need further inputs, or support no beams
            if decodings is not None:
                raise
            continue
        if isinstance(tokens, torch.Tensor):
            tokens_by_way[name] = tokens
    return tokens_by_way


def _decode(model: Any, inputs: dict[str, Any], way: dict[str, Any]) -> Any:
    copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    _thread.generator = torch.Generator().manual_seed(_SEED)
    return model.generate(**copies, **way, **length_options(model, _TOKENS))


@contextmanager
def draws_of_each_thread() -> Iterator[None]:
    """Let each thread sample from its own generator within the block, because ranks are threads, and torch has one
    generator for all threads."""
    multinomial = torch.multinomial

    def draw(input: torch.Tensor, num_samples: int, replacement: bool = False) -> torch.Tensor:
        return multinomial(input, num_samples, replacement, generator=_thread.generator)

    with mock.patch.object(torch, "multinomial", draw):
        yield
