"""Tests `fit={"cache": …}`: keys and values in int8, or in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from parallelformers_ng import ParallelError, parallelize
from parallelformers_ng.generation import cache_kinds
from parallelformers_ng.generation.int8_layer import Int8Layer
from parallelformers_ng.runtime.group import WorkerGroup
from tests.generation.test_caches import play
from tests.pretend_cuda.caller import TARGET, small
from tests.zoo.build import build
from tests.zoo.case import seq2seq_inputs, text_inputs, token_ids
from tests.zoo.decoders import GEMMA3, decoder
from tests.zoo.encoders import encoder
from tests.zoo.seq2seq import t5
from tests.zoo.state_space import recurrent

IN_INT8 = {"cache": "int8"}
HOW: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


@pytest.fixture(params=[2, 3], scope="module")
def llama(request: pytest.FixtureRequest, groups: Any) -> Iterator[Any]:
    with parallelize(decoder("Llama"), workers=groups(request.param), fit=IN_INT8, batching=True) as parallel:
        yield parallel


@pytest.fixture
def in_int8(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make caches in this process int8, too."""
    monkeypatch.setattr(DynamicCache, "__init__", DynamicCache.__init__)  # undo the assignment afterwards
    cache_kinds.keep_caches("int8")
    yield
    cache_kinds.keep_caches(None)


def test_next_model_has_ordinary_caches() -> None:
    plain = DynamicCache.__init__
    for kind in ("int8", "int8", None):
        cache_kinds.keep_caches(kind)
        assert (DynamicCache.__init__ is plain) == (kind is None)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@torch.no_grad()
def test_a_cache_in_int8_is_a_cache(llama: Any) -> None:
    for got, want in zip(play(llama), play(decoder("Llama")), strict=True):
        assert 1e-4 < distance(got, want) <= 2e-2, "as exact as int8 allows, but not exact"


@torch.no_grad()
def test_ranks_in_int8_equal_one_process(llama: Any, in_int8: None) -> None:
    whole = decoder("Llama")
    # A value may round to the next code.
    assert all(distance(*pair) <= 5e-3 for pair in zip(play(llama), play(whole), strict=True))
    for settings in (HOW, {**HOW, "num_beams": 3}, {**HOW, "do_sample": True, "seed": 5}):
        own_settings = {name: value for name, value in settings.items() if name != "seed"}
        torch.manual_seed(5)
        want = whole.generate(**text_inputs(), **own_settings)
        torch.manual_seed(5)
        assert torch.equal(llama.generate(**text_inputs(), **settings), want)


def test_callers_cache_is_kept_in_int8_too(llama: Any) -> None:
    kinds: list[str] = []
    hook = llama.model.register_forward_hook(
        lambda module, args, output: kinds.extend(type(each).__name__ for each in output.past_key_values.layers)
    )
    caches = [DynamicCache(), DynamicCache(config=llama.config)]
    logits = [llama(token_ids(), past_key_values=cache).logits for cache in (*caches, None)]
    hook.remove()
    assert kinds == ["Int8Layer"] * 6
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[2])


def test_calls_decoded_together_get_solo_tokens(llama: Any) -> None:
    prompts = [token_ids(1, length, seed=length) for length in (5, 9, 23)]
    alone = [llama.generate(prompt, **HOW) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda prompt: llama.generate(prompt, **HOW), prompts))
    assert all(map(torch.equal, together, alone))
    longer = torch.cat((alone[2], token_ids(1, 3)), -1)  # begins with the kept prefix
    assert torch.equal(llama.generate(longer, **HOW), llama.generate(longer, **HOW, use_cache=True, num_beams=1))


@torch.no_grad()
def test_two_thousand_tokens_take_few_bytes(groups: Any) -> None:
    config = decoder("Llama", layers=1, heads=2, key_heads=2).config
    config.head_dim = 64
    whole, ids, nbytes = build(LlamaForCausalLM, config), token_ids(1, 2048), list[int]()
    want = whole(ids, use_cache=True)
    plain = sum(part.nbytes for layer in want.past_key_values.layers for part in (layer.keys, layer.values))
    wanted = [want.logits, whole(token_ids(1, 1), past_key_values=want.past_key_values).logits]

    def note(module: Any, args: Any, output: Any) -> None:
        parts = [part for layer in output.past_key_values.layers for part in layer.parts]
        nbytes.append(sum(tensor.nbytes for part in parts for tensor in (part.keys, part.values)))

    with parallelize(build(LlamaForCausalLM, config), workers=groups(2), fit=IN_INT8) as parallel:
        hook = parallel.model.register_forward_hook(note)
        first = parallel(ids, use_cache=True)
        hook.remove()
        outputs = [first.logits, parallel(token_ids(1, 1), past_key_values=first.past_key_values).logits]
    assert 2 * nbytes[0] <= 0.3 * plain, "hooks run on the rank that has one of two heads"
    assert all(distance(*pair) <= 2e-2 for pair in zip(outputs, wanted, strict=True))


@torch.no_grad()
def test_cross_attention_reads_int8_caches(groups: Any, in_int8: None) -> None:
    """Cross-attention reads keys and values without adding to them."""
    inputs = {name: value for name, value in seq2seq_inputs().items() if name != "decoder_input_ids"}
    with parallelize(t5(), workers=groups(2), fit=IN_INT8) as parallel:
        assert torch.equal(parallel.generate(**inputs, **HOW), t5().generate(**inputs, **HOW))


def test_windows_and_next_model_are_unaffected(groups: Any) -> None:
    kinds: list[str] = []
    for fit in (IN_INT8, None):
        with parallelize(decoder("Gemma3Text", tied=True, **GEMMA3), workers=groups(2), fit=fit) as parallel:
            parallel.model.register_forward_hook(
                lambda module, args, output: kinds.extend(type(each).__name__ for each in output.past_key_values.layers)
            )
            parallel(**text_inputs(), use_cache=True)
    window = "DynamicSlidingWindowLayer"
    assert kinds == [window, "Int8Layer", window, "DynamicLayer"]


def test_codes_have_the_accuracy_of_eight_bits() -> None:
    states = torch.randn(2, 3, 50, 16) * 10.0 ** torch.arange(-20, 30).view(50, 1)
    states[0, 0, 0] = 0.0
    states[0, 0, 1, 5] = float("nan")
    layer, plain = Int8Layer(), DynamicLayer()
    for part in states.split(17, -2):
        keys, values = layer.update(part, -part)
        plain.update(part, -part)
    assert torch.equal(values.nan_to_num(), -keys.nan_to_num())
    largest = plain.keys.abs().amax(-1, keepdim=True)
    assert bool(((keys - plain.keys).abs() <= largest / 127 * 0.51).sum() >= keys.numel() - 16)
    assert bool(keys[0, 0, 1].isnan().all())
    for each in (layer, plain):
        each.reset()
    assert layer.get_seq_length() == plain.get_seq_length()


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (small, {"fit": {"cache": "int4"}}, "fit: cache is 'int4'; it takes 'int8', 'offload' or None"),
        (small, {"fit": {"cache": "offload"}}, "CPU ranks already keep them there"),
        (small, {"fit": IN_INT8, "decode": "compile"}, "caches of a fixed size"),
        (lambda: encoder("Bert"), {"fit": IN_INT8}, "BertForMaskedLM takes no cache"),
        (lambda: recurrent("Mamba"), {"fit": IN_INT8}, "MambaForCausalLM"),
    ],
)
def test_unsupported_cache_kinds_are_refused(groups: Any, make: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ParallelError, match=why):
        parallelize(make(), workers=groups(2), **options)


def test_offloaded_on_pretended_devices(pretended_groups: Any) -> None:
    """Between steps, the keys and values of all layers but one are in host memory."""
    devices: list[list[str]] = []

    def note(module: Any, args: Any, output: Any) -> None:
        devices.append([each.keys.device.type for each in output.past_key_values.layers])

    with parallelize(decoder("Llama", layers=3), workers=pretended_groups(2), fit={"cache": "offload"}) as parallel:
        parallel.model.register_forward_hook(note)
        assert torch.equal(
            parallel.generate(**text_inputs(), **HOW), decoder("Llama", layers=3).generate(**text_inputs(), **HOW)
        )
    assert all(each.count("cpu") >= 2 for each in devices)


def test_offloaded_keys_leave_before_they_return(pretended_groups: Any) -> None:
    """With transformers 5.17, which does not wait for the copy, keys must leave before they return, too."""
    whole = decoder("Llama", layers=3)
    with WorkerGroup(1, "cuda", target=TARGET, timeout=60) as group:
        group.call("prefetch_as_in_5_17")
        for fit, settings in (({"cache": "offload"}, {}), ({}, {"cache_implementation": "offloaded"})):
            with parallelize(decoder("Llama", layers=3), workers=group, fit=fit) as parallel:
                got = parallel.generate(**text_inputs(), **HOW, **settings)
            assert torch.equal(got, whole.generate(**text_inputs(), **HOW))
