"""Compares the C kernels of a decode step with torch's operators, on one thread, with data larger than CPU caches.

    python -m benchmarks.kernels [--rounds 5] [--json OUT]

A figure is gigabytes of weights, or of keys and values, read per second. The C kernel and torch take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks import measure
from parallelformers_ng.kernels.installation import install
from parallelformers_ng.kernels.operators import MAX_ROWS
from parallelformers_ng.kernels.sdpa import with_kernel

NBYTES = 256 << 20
LAYERS = [(1024, 1024), (3072, 512), (576, 768)]  # inputs, outputs
HEADS, SHARED, WIDTH = 8, 2, 128  # query heads, query heads for each key/value head, head size
TOKENS = (128, 512, 2048)
DTYPES = (torch.float32, torch.bfloat16)


def linear(inputs: int, outputs: int, rows: int, dtype: torch.dtype) -> dict[str, Callable[[], float]]:
    """Return functions that measure GB of weights per second, of `nn.Linear` with torch's operator and with the C
    kernel."""
    count = NBYTES // (inputs * outputs * dtype.itemsize)
    whole = [nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False) for _ in range(count)]
    other = [nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False) for _ in range(count)]
    for layer in other:
        install(layer)
    x = torch.randn(1, rows, inputs).to(dtype)

    def through(layers: list[nn.Linear]) -> Callable[[], float]:
        return lambda: NBYTES / 1e9 / measure.seconds(lambda: [layer(x) for layer in layers])

    return {"torch": through(whole), "kernel": through(other)}


def attention(tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], float]]:
    """Return functions that measure GB of keys and values per second for one query, of transformers' `sdpa` with
    torch's operator and with the C kernel."""
    shape = (1, HEADS // SHARED, tokens, WIDTH)
    count = max(1, NBYTES // (2 * HEADS // SHARED * tokens * WIDTH * dtype.itemsize))
    caches = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(count)]
    query, module = torch.randn(1, HEADS, 1, WIDTH).to(dtype), SimpleNamespace(num_key_value_groups=SHARED)
    nbytes = sum(key.nbytes + value.nbytes for key, value in caches)

    def through(attend: Callable) -> Callable[[], float]:
        return lambda: nbytes / 1e9 / measure.seconds(lambda: [attend(module, query, *cache, None) for cache in caches])

    return {"torch": through(sdpa_attention_forward), "kernel": through(with_kernel(sdpa_attention_forward))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    print(measure.machine())
    torch.set_num_threads(1)
    with torch.inference_mode():
        for dtype in DTYPES:
            for inputs, outputs in LAYERS:
                for rows in (1, 2, 4, 8, 16):
                    if rows <= MAX_ROWS[dtype]:
                        what = f"linear {inputs} to {outputs}, {rows} rows, {dtype}"
                        _compare(what, linear(inputs, outputs, rows, dtype), options)
            for tokens in TOKENS:
                _compare(f"attention over {tokens} tokens, {dtype}", attention(tokens, dtype), options)


def _compare(what: str, contestants: dict[str, Callable[[], float]], options: argparse.Namespace) -> None:
    for contestant in contestants.values():
        contestant()
    figures = measure.interleave(contestants, options.rounds)
    measure.report(what, "GB/s", figures, against="torch", higher_is_better=True)
    measure.save(options.json, what, figures)


if __name__ == "__main__":
    main()
