"""Compares linear layers and norms in C with torch, and tests the cases that torch computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from parallelformers_ng.kernels import operators
from parallelformers_ng.kernels.installation import install
from parallelformers_ng.kernels.operators import MAX_ROWS, FusedRMSNorm, StreamingLinear, StreamingQuantizedLinear
from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.quantized import hold

pytestmark = pytest.mark.skipif(operators._decode is None, reason="the C kernel is not built")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of row counts of the kernel's calls."""
    seen: list[int] = []

    class Counting:
        @staticmethod
        def linear(*arguments: int) -> None:
            seen.append(arguments[7])
            kernel.linear(*arguments)

    kernel = operators._decode
    monkeypatch.setattr(operators, "_decode", Counting)
    return seen


def _layer(inputs: int, outputs: int, dtype: torch.dtype, bias: bool) -> StreamingLinear:
    torch.manual_seed(inputs * outputs)
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    install(layer)
    assert type(layer) is StreamingLinear
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [1, 15, 16, 17, 63, 64, 65, 80, 129, 576])
def test_results_are_as_exact_as_those_of_torch(
    inputs: int, dtype: torch.dtype, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_ROWS, dtype, 32)  # independent of this processor's limit
    for outputs in (1, 2, 7, 33):
        for bias in (False, True):
            layer = _layer(inputs, outputs, dtype, bias)
            for shape in ((inputs,), (1, 1, inputs), (1, 2, inputs), (1, 3, inputs), (2, 2, inputs), (1, 23, inputs)):
                x = torch.randn(shape).to(dtype)
                with torch.inference_mode():
                    got = layer(x)
                wide = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
                assert got.shape == wide.shape
                assert got.dtype is dtype
                torch.testing.assert_close(got, wide.to(dtype))
    assert set(calls) == {1, 2, 3, 4, 23}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "group"), [("int8", 160), ("int4", 32)])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_non_finite_inputs_act_as_in_torch(
    kind: str, group: int, value: float, dtype: torch.dtype, calls: list[int]
) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(160, 24, bias=False, dtype=dtype).requires_grad_(False)
    encoding = Encoding(kind, -1, group)
    numbers, scales = encoding.encode(layer.weight)
    numbers[3] = 0  # zero times infinity is NaN
    weight = encoding.decode(numbers, scales, dtype)
    hold(layer, "weight", encoding, numbers, scales, dtype)
    layer.__class__ = StreamingQuantizedLinear
    for rows in (1, 3, 7):  # one row at a time, or several in tiles
        x = torch.randn(1, rows, 160).to(dtype)
        x[0, rows // 2, 7] = value
        with torch.inference_mode():
            torch.testing.assert_close(layer(x), F.linear(x, weight), equal_nan=True, rtol=2e-2, atol=1e-2)
    assert calls


def test_bfloat16_rounds_once_to_nearest_even() -> None:
    layer = _layer(2, 1, torch.bfloat16, bias=False)
    layer.weight.copy_(torch.tensor([[1.0, 1.0]]))
    x = torch.tensor([[1.0, 2**-8], [1.0, 3 * 2**-8], [float("inf"), 1.0], [float("nan"), 1.0]], dtype=torch.bfloat16)
    with torch.inference_mode():
        got = layer(x).flatten().tolist()
    assert got[:3] == [1.0, 1.0 + 2**-6, float("inf")]
    assert got[3] != got[3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_rows_nor_outputs_depend_on_their_neighbours(dtype: torch.dtype, calls: list[int]) -> None:
    rows = MAX_ROWS[dtype]
    layer, x = _layer(571, 43, dtype, bias=True), torch.randn(rows, 571).to(dtype)
    part = nn.Linear(571, 2, dtype=dtype)
    install(part)
    part.load_state_dict({name: tensor[5:7] for name, tensor in layer.state_dict().items()})
    with torch.inference_mode():
        whole = layer(x)
        assert torch.equal(whole, torch.cat([layer(pair) for pair in x.split(2)]))
        assert torch.equal(whole[:, 5:7], part(x))
        assert torch.equal(whole, torch.cat([layer(row[None]) for row in x]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slice_of_a_wider_matrix_is_read_directly(dtype: torch.dtype, calls: list[int]) -> None:
    layer, wide = _layer(70, 9, dtype, bias=True), torch.full((9, 200), torch.nan).to(dtype)
    wide[:, 101:171] = layer.weight
    x = torch.randn(3, 70).to(dtype)
    with torch.inference_mode():
        want = layer(x)
        layer.weight = nn.Parameter(wide[:, 101:171], requires_grad=False)
        assert torch.equal(layer(x), want)
        layer.weight = nn.Parameter(want.new_empty(70, 9).t(), requires_grad=False)
        layer(x)  # the columns are contiguous, the rows are not
    assert calls == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_last_states_of_prompts_run_in_the_kernel(dtype: torch.dtype, calls: list[int]) -> None:
    """The states have strides; torch's own layer would copy the weight once for each prompt."""
    layer, states = _layer(70, 9, dtype, bias=True), torch.randn(3, 5, 70).to(dtype)
    with torch.inference_mode():
        want = torch.cat([layer(prompt[None, -1:]) for prompt in states])
        assert torch.equal(layer(states[:, -1:]), want)
    assert calls == [1, 1, 1, 3]


def test_layer_is_left_to_torch_when_needed(calls: list[int]) -> None:
    layer = _layer(8, 4, torch.float32, bias=True)
    x = torch.randn(1, 8)
    layer(x.requires_grad_()).sum().backward()
    assert x.grad is not None, "outside of inference mode gradients flow"
    with torch.inference_mode():
        x = torch.randn(MAX_ROWS[torch.float32] + 1, 8)
        layer(x)
        layer(x[:0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x[:1]).dtype is torch.bfloat16
        with pytest.raises(RuntimeError):
            layer(x[:1, :7])
        with pytest.raises(RuntimeError):
            layer(x[:1].double())
        assert calls == []
        layer(x[:1])
    assert calls == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 7, 32, 45, 576])
def test_norms_are_those_of_the_model(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    plain, fused = LlamaRMSNorm(width, eps=1e-3).to(dtype), Qwen3RMSNorm(width, eps=1e-3).to(dtype)
    plain.weight.data.copy_(torch.randn(width))
    fused.load_state_dict(plain.state_dict())
    install(fused)
    assert isinstance(fused, FusedRMSNorm)
    assert isinstance(fused, Qwen3RMSNorm)
    for shape in ((width,), (1, 1, width), (2, 9, width), (0, width)):
        x = (torch.randn(shape) * 3).to(dtype)
        with torch.inference_mode():
            torch.testing.assert_close(fused(x), plain(x))
    x = torch.randn(4, width, dtype=dtype, requires_grad=True)
    fused(x).float().sum().backward()
    assert x.grad is not None
    with torch.inference_mode():
        wide = torch.randn(2, 2 * width).to(dtype)[:, ::2]
        assert torch.equal(fused(wide), plain(wide)), "a strided input is left to torch"


def test_only_norms_with_identical_code_are_changed() -> None:
    for norm in (GemmaRMSNorm(4), nn.RMSNorm(4)):
        install(norm)
        assert not isinstance(norm, FusedRMSNorm)


def test_only_plain_layers_are_changed() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Own(2, 2), nn.Conv1d(1, 1, 1))
    install(model)
    assert [type(layer) for layer in model] == [StreamingLinear, Own, nn.Conv1d]
