"""Tests the kernels and the memory traffic of a captured decode step, counted by `tests/pretend_cuda/kernels.py`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.integrations import sdpa_attention
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from parallelformers_ng import parallelize
from parallelformers_ng.cuda_graphs.masks import added, masks_converted_once
from parallelformers_ng.kernels import on_devices
from parallelformers_ng.kernels.recognition import fused_norm
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.quantized import QuantizedLinear, hold
from parallelformers_ng.worker.preload import IMPORTS
from tests.zoo.build import largest_difference
from tests.zoo.case import seq2seq_inputs, text_inputs
from tests.zoo.decoders import decoder
from tests.zoo.seq2seq import t5

HOW: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
WIDTH, INNER, LAYERS = 48, 80, 2


@pytest.fixture(scope="module")
def counting() -> Iterator[WorkerGroup]:
    """Yield a group of one rank that counts kernels."""
    from tests.pretend_cuda.caller import believe

    with pytest.MonkeyPatch.context() as patch:
        believe(patch)
        group = WorkerGroup(1, "cuda", target="tests.pretend_cuda.kernels:CountingRunner", imports=IMPORTS, timeout=60)
        yield group
        group.close()


def step_of(group: WorkerGroup, model: Any, **options: Any) -> dict[str, int]:
    """Return the kernels of a decode step of this model, by name."""
    with parallelize(model, workers=group, decode="cuda_graphs", **options) as model:
        model.generate(**text_inputs(), **HOW)
        return group.call("launched")


@pytest.mark.parametrize(("family", "most"), [("Llama", 29), ("Qwen3", 33)])
def test_kernels_of_a_layer(family: str, most: int, counting: WorkerGroup) -> None:
    """Qwen3 has two additional norms, for queries and for keys; the inputs of these norms are copied first."""
    less, more = (step_of(counting, decoder(family, layers=n).to(torch.bfloat16)) for n in (2, 3))
    of_layer = {name: count - less[name] for name, count in more.items() if count > less[name]}
    assert sum(of_layer.values()) <= most, of_layer
    assert of_layer["aten.linear.default"] == 4  # q | k | v, the output, gate | up, down
    assert not {"conversion of a mask", "aten.where.self", "aten.logical_not.default", "aten.arange.default"} & {
        *of_layer
    }
    assert not {"aten.rsqrt.default", "aten.mean.dim"} & {*of_layer}


@pytest.mark.parametrize(
    ("scheme", "dtype", "most"),
    [
        ("int8", torch.bfloat16, 5),
        ("fp8", torch.bfloat16, 5),
        ("int8", torch.float16, 5),  # its largest number is 65504: the weight is scaled before the product
        ("fp8", torch.float16, 9),
        ("int8", torch.float32, 9),
        ("int4", torch.bfloat16, 11),
    ],
    ids=str,
)
def test_bytes_of_a_quantized_weight(scheme: str, dtype: torch.dtype, most: int, counting: WorkerGroup) -> None:
    block = {"group": 16} if scheme == "int4" else {}
    model = decoder("Llama", layers=LAYERS, width=INNER).to(dtype)
    step_of(counting, model, quantize={"scheme": scheme, **block})
    weights = 3 * LAYERS  # gate, up and down
    numbers = WIDTH * INNER
    moved = counting.call("moved", numbers) + counting.call("moved", numbers // 2)
    assert 3 <= moved / (weights * numbers) <= most


def test_keys_are_read_where_they_lie(counting: WorkerGroup) -> None:
    model = decoder("Llama", layers=LAYERS).to(torch.bfloat16)
    config = model.config
    step_of(counting, model)
    keys = 2 * config.num_key_value_heads * 128 * (config.hidden_size // config.num_attention_heads)
    assert counting.call("moved", keys) == LAYERS * 2 * 2 * keys  # layers, keys and values, bytes of a number
    groups = config.num_attention_heads // config.num_key_value_heads
    assert groups > 1
    assert counting.call("moved", keys * groups) == 0


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "llama": (lambda: decoder("Llama"), {}, "rms_norm"),
    "olmo2": (lambda: decoder("Olmo2"), {}, "rms_norm"),
    "cohere": (lambda: decoder("Cohere", tied=True), {}, "layer_norm"),
    "llama, int8": (lambda: decoder("Llama"), {"quantize": "int8"}, "rms_norm"),
    "llama, fp8": (lambda: decoder("Llama"), {"quantize": "fp8"}, "rms_norm"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers(case: str, counting: WorkerGroup) -> None:
    """A quantized model must equal a model of the same scheme on the host; all other models must equal transformers."""
    make, options, norm = CASES[case]
    whole: Any = make()
    if options:
        whole = parallelize(whole, 1, workers={"device": "cpu"}, **options)
    want, tokens = whole(**text_inputs()).logits, whole.generate(**text_inputs(), **HOW)
    with parallelize(make(), workers=counting, decode="cuda_graphs", **options) as model:
        assert largest_difference(model(**text_inputs()).logits, want) <= 1e-4
        assert torch.equal(model.generate(**text_inputs(), **HOW), tokens)
        assert counting.call("launched")[f"aten.{norm}.default"] >= 2
    if options:
        whole.deparallelize()


def test_encoders_have_the_norms_too(counting: WorkerGroup) -> None:
    whole, inputs = t5(), seq2seq_inputs()
    with parallelize(t5(), workers=counting) as model:
        assert largest_difference(model(**inputs).logits, whole(**inputs).logits) <= 1e-4
        assert counting.call("norms") == {"T5LayerNorm": 2 + 3 * 2 + 2 * 2}


def _doubled(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return _LLAMAS(self, hidden_states) * 2


_LLAMAS = LlamaRMSNorm.forward


def test_changed_norm_code_runs_on_the_device(counting: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    with parallelize(decoder("Llama"), workers=counting, decode="cuda_graphs") as model:
        model.generate(**text_inputs(), **HOW)
        assert "aten.rms_norm.default" in counting.call("launched")
    monkeypatch.setattr(LlamaRMSNorm, "forward", _doubled)
    want = decoder("Llama")(**text_inputs()).logits
    with parallelize(decoder("Llama"), workers=counting, decode="cuda_graphs") as model:
        assert largest_difference(model(**text_inputs()).logits, want) <= 1e-4
        model.generate(**text_inputs(), **HOW)
        assert "aten.rms_norm.default" not in counting.call("launched")


class OwnRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + self.weight


def test_norms_are_recognized_by_their_code() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm

    assert fused_norm(MistralRMSNorm) == "rms_norm"
    assert [fused_norm(cls) for cls in (OwnRMSNorm, GemmaRMSNorm, nn.LayerNorm, nn.RMSNorm)] == [""] * 4


@pytest.mark.parametrize("what", ["rms_norm", "linear", "scaled_dot_product_attention"])
def test_differing_kernels_are_left_to_modelling_code(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual = getattr(functional, what)
    agree: dict[str, Callable[[], bool]] = {
        "rms_norm": lambda: on_devices._norm_agrees.__wrapped__(LlamaRMSNorm, "rms_norm"),
        "linear": on_devices._product_agrees.__wrapped__,
        "scaled_dot_product_attention": lambda: on_devices._attention_agrees.__wrapped__(_repeating),
    }
    assert agree[what]()
    assert not caplog.records

    def differing(*args: Any, **kwargs: Any) -> Any:
        return usual(*args, **kwargs) * 1.01

    monkeypatch.setattr(on_devices, "functional", SimpleNamespace(**vars(functional)))
    monkeypatch.setattr(on_devices.functional, what, differing)
    monkeypatch.setattr(on_devices.DeviceRMSNorm, "fused", staticmethod(differing))
    with caplog.at_level(logging.WARNING):
        assert not agree[what]() or what == "linear"
    if what == "linear":  # both computations call it
        return
    assert "computed by the modelling code: results of the kernels differ by 1.0e-02" in caplog.text


def _repeating(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None) -> Any:
    """Compute a step like `sdpa_attention_forward` of transformers 5.17, which copies keys and values for each query
    head."""
    key, value = (sdpa_attention.repeat_kv(each, module.num_key_value_groups) for each in (key, value))
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat tensors of the host as tensors of a device."""
    monkeypatch.setattr(on_devices, "_serves", lambda input: True)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_attention_over_packed_queries(groups: int, rows: int, served: None) -> None:
    called: list[int] = []

    @functools.wraps(_repeating)
    def noted(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return _repeating(*args, **kwargs)

    packed, module = on_devices.with_packed_queries(noted), SimpleNamespace(num_key_value_groups=groups)
    query = torch.randn(rows, 2 * groups, 1, 8)
    key, value = torch.randn(rows, 2, 16, 8), torch.randn(rows, 2, 16, 4)
    mask = torch.arange(16) < torch.tensor([9, 13])[:rows].view(-1, 1, 1, 1)
    for masks in (mask, torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf), mask[:1]):
        want, _ = _repeating(module, query, key, value, masks, scaling=0.4)
        got, _ = packed(module, query, key, value, masks, scaling=0.4)
        assert got.shape == want.shape
        assert largest_difference(got, want) <= 1e-5
    assert not called
    other = mask.expand(rows, 2 * groups, 1, 16).clone()
    other[:, 0] = True  # one head attends to more positions
    got, _ = packed(module, query, key, value, other, scaling=0.4)
    assert torch.equal(got, _repeating(module, query, key, value, other, scaling=0.4)[0])
    assert called


def test_masks_are_converted_once_in_a_step() -> None:
    mask = torch.tensor([[[[True, False, True]]]])
    assert added(mask, torch.float32) is mask
    with masks_converted_once():
        numbers = added(mask, torch.float32)
        assert numbers.tolist() == [[[[0.0, torch.finfo(torch.float32).min, 0.0]]]]
        assert added(mask, torch.float32) is numbers
        assert added(mask, torch.bfloat16).dtype is torch.bfloat16
        assert added(mask.clone(), torch.float32) is not numbers
        assert added(numbers, torch.float32) is numbers
    assert added(mask, torch.float32) is mask


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_8_bits(kind: str, dtype: torch.dtype, served: None) -> None:
    layer = nn.Linear(24, 10).to(dtype)
    encoding = Encoding(kind, -1, 24)
    hold(layer, "weight", encoding, *encoding.encode(layer.weight.detach()), dtype)
    assert type(layer) is QuantizedLinear
    states = torch.randn(3, 24, dtype=dtype)
    with torch.inference_mode():
        want = layer(states)
        layer.__class__ = on_devices.DeviceQuantizedLinear
        assert largest_difference(layer(states), want) <= (1e-6 if dtype is torch.float32 else 2e-2)


def test_products_that_float16_cannot_hold(served: None) -> None:
    layer = nn.Linear(512, 4, bias=False).half()
    nn.init.constant_(layer.weight, 0.01)
    encoding = Encoding("fp8", -1, 512)
    hold(layer, "weight", encoding, *encoding.encode(layer.weight.detach()), torch.float16)
    layer.__class__ = on_devices.DeviceQuantizedLinear
    with torch.inference_mode():
        output = layer(torch.ones(1, 512, dtype=torch.float16))  # 512 · 448 before the scaling
    assert largest_difference(output.float(), torch.full((1, 4), 5.12)) <= 1e-2


@pytest.mark.parametrize("make", [lambda: decoder("Llama"), t5], ids=["llama", "t5"])
def test_notes_of_a_process_are_no_changes(make: Callable[[], Any], counting: WorkerGroup) -> None:
    """Each process keeps its own notes in attributes of classes, as transformers 5.17 does. The notes do not count as
    changes of code."""
    with parallelize(make(), workers=counting):
        assert counting.call("changed_code") == []
