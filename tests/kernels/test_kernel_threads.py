"""Tests that products computed by several threads equal products of one thread, bit for bit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from parallelformers_ng.kernels import operators
from parallelformers_ng.kernels.operators import MAX_ROWS, StreamingLinear, StreamingQuantizedLinear
from parallelformers_ng.kernels.sdpa import with_kernel
from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.quantized import hold
from tests.helpers import step_models

pytestmark = pytest.mark.skipif(operators._decode is None, reason="the C kernel is not built")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
INPUTS, OUTPUTS = 1056, 2011
"""Sizes that are not multiples of the kernel's tiles, and enough bytes for several threads."""


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    yield operators._decode.use_threads
    operators._decode.use_threads(1)


@DTYPES
@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_linear_layer_is_equal_with_any_threads(
    kind: str | None, dtype: torch.dtype, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_ROWS, dtype, 32)  # independent of this processor's limit
    layer = _layer(kind, dtype)
    for rows in (1, 2, 7, 23):
        x = torch.randn(1, rows, INPUTS).to(dtype)
        _is_equal_with_any_threads(threads, lambda x=x: layer(x))


@DTYPES
@pytest.mark.parametrize("tokens", [600, 1111])
def test_attention_is_equal_with_any_threads(tokens: int, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    attend, module = with_kernel(sdpa_attention_forward), SimpleNamespace(num_key_value_groups=3)
    query = torch.randn(2, 15, 1, 48).to(dtype)
    key, value = torch.randn(2, 2, 5, tokens, 48).to(dtype)
    _is_equal_with_any_threads(threads, lambda: attend(module, query, key, value, None)[0])
    with torch.inference_mode():
        torch.testing.assert_close(
            attend(module, query, key, value, None)[0], sdpa_attention_forward(module, query, key, value, None)[0],
            rtol=2e-2, atol=1e-2 if dtype is torch.bfloat16 else 1e-5,
        )  # fmt: skip


@DTYPES
def test_step_through_all_layers_equals_single_thread(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    fused = step_models.models("llama", dtype, as_one=True)[1]
    _is_equal_with_any_threads(threads, lambda: step_models.step(fused))


def test_concurrent_callers_get_their_own_products(threads: Callable[[int], None]) -> None:
    threads(3)
    layer, failed = _layer(None, torch.float32), []

    def call(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for _ in range(200):
                x = torch.randn(1, INPUTS, generator=draw)
                if not torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-4):
                    failed.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failed


def test_a_forked_process_has_threads_of_its_own(threads: Callable[[int], None]) -> None:
    threads(3)
    layer, x = _layer(None, torch.float32), torch.randn(1, INPUTS)
    with torch.inference_mode():
        wanted = layer(x)
        child = os.fork()
        if not child:  # the child returns nothing but an exit code
            os._exit(0 if torch.equal(layer(x), wanted) and len(os.listdir("/proc/self/task")) == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _layer(kind: str | None, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layer: nn.Module = nn.Linear(INPUTS, OUTPUTS, dtype=dtype).requires_grad_(False)
    if kind is None:
        layer.__class__ = StreamingLinear
        return layer
    encoding = Encoding(kind, -1, 32 if kind == "int4" else INPUTS)
    hold(layer, "weight", encoding, *encoding.encode(layer.weight), dtype)
    layer.__class__ = StreamingQuantizedLinear
    return layer


def _is_equal_with_any_threads(threads: Callable[[int], None], compute: Callable[[], Tensor]) -> None:
    with torch.inference_mode():
        threads(1)
        alone: Any = compute()
        for count in (2, 3, 7):
            threads(count)
            for _ in range(3):
                assert torch.equal(compute(), alone), f"{count} threads"
