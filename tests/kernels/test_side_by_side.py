"""Tests that linear layers that read the same tensor are computed as one layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.collectives.threads import ThreadCommunicator, _Meeting
from parallelformers_ng.kernels.side_by_side import MAX_ROWS, PartOfProduct, SideBySide, lay_side_by_side
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from tests.zoo.build import largest_difference
from tests.zoo.case import seq2seq_inputs, text_inputs, token_ids
from tests.zoo.decoders import decoder
from tests.zoo.encoders import encoder
from tests.zoo.seq2seq import bart, t5

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def widths_of_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the output width of each later product, in order. After this call,
    parallelized models count as models with foreign code."""
    widths: list[int] = []
    linear = functional.linear

    def noted(input: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        widths.append(len(weight))
        return linear(input, weight, bias)

    monkeypatch.setattr(functional, "linear", noted)
    return widths


def joined(whole: Any) -> Any:
    """Return a model of a single rank, with joined layers."""
    share = cut(whole, build_plan(whole, 1, select(whole)), 0, ThreadCommunicator(0, 1, _Meeting(1, timeout=60)))
    lay_side_by_side(share)
    return share


def as_one(model: Any) -> set[str]:
    """Return the last parts of the names of layers that are computed together with another layer."""
    joined_layers = [name for name, module in model.named_modules() if isinstance(module, PartOfProduct)]
    return {name.rpartition(".")[2] for name in joined_layers}


def test_a_step_launches_fewer_products(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, model, ids = decoder("Llama"), joined(decoder("Llama")), token_ids(rows=1)
    products = widths_of_products(monkeypatch)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model.generate(ids, **GREEDY), whole.generate(ids, **GREEDY))
        cache = model(ids).past_key_values
        products.clear()
        logits = model(ids[:, :1], past_key_values=cache).logits
        assert products == [48 + 24 + 24, 48, 2 * 74, 48] * 2 + [131]
        whole_cache = whole(ids).past_key_values
        assert largest_difference(logits, whole(ids[:, :1], past_key_values=whole_cache).logits) <= 1e-4


FAMILIES: dict[str, tuple[Callable[[], Any], dict[str, Any], set[str]]] = {
    "llama": (lambda: decoder("Llama"), text_inputs(), {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
    "qwen2, with biases": (
        lambda: decoder("Qwen2"),
        text_inputs(),
        {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
    ),
    "bert": (lambda: encoder("Bert"), text_inputs(), {"query", "key", "value"}),
    "t5": (lambda: t5(gated=True), seq2seq_inputs(), {"q", "k", "v", "wi_0", "wi_1"}),
    "bart": (bart, seq2seq_inputs(), {"q_proj", "k_proj", "v_proj"}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_numbers(family: str) -> None:
    make, inputs, parts = FAMILIES[family]
    whole, model = make(), joined(make())
    with torch.inference_mode():
        for _ in range(2):
            assert largest_difference(model(**inputs)[0], whole(**inputs)[0]) <= 1e-4
        assert as_one(model) == parts
        assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in model.state_dict().items())
        if whole.can_generate():
            inputs = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
            for way in ({}, {"num_beams": 3}):
                assert torch.equal(model.generate(**inputs, **GREEDY, **way), whole.generate(**inputs, **GREEDY, **way))


def test_layers_that_read_different_tensors_are_left() -> None:
    """In cross-attention, for example, queries read the decoder's states, and keys and values read the encoder's
    states."""
    model = joined(t5())
    with torch.inference_mode():
        model(**seq2seq_inputs())
    decoder_layer = model.decoder.block[0].layer
    assert type(decoder_layer[0].SelfAttention.q) is PartOfProduct
    assert type(decoder_layer[1].EncDecAttention.q) is nn.Linear


class Pair(nn.Module):
    """Two layers of the same width, which may read the same tensor."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 5), nn.Linear(8, 3)
        self.between = between

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([self.first(input), self.second(self.between(input))], -1)


def pair(between: Callable[[Tensor], Tensor] = lambda input: input) -> tuple[Pair, Pair]:
    torch.manual_seed(0)
    whole = Pair(between)
    model = copy.deepcopy(whole)
    lay_side_by_side(model)
    return whole, model


def test_changed_input_counts_as_another() -> None:
    whole, model = pair(lambda input: input.mul_(2))
    with torch.inference_mode():
        for _ in range(3):
            states = torch.randn(2, 8)
            torch.testing.assert_close(model(states.clone()), whole(states.clone()))
    assert type(model.first) is nn.Linear


def test_wrong_joint_product_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    product = SideBySide._product
    monkeypatch.setattr(SideBySide, "_product", lambda self, input: product(self, input) * 1.1)
    whole, model = pair()
    with torch.inference_mode():
        for _ in range(3):
            states = torch.randn(2, 8)
            torch.testing.assert_close(model(states), whole(states))


def test_hooks_see_each_layer_as_before() -> None:
    whole, model = pair()
    seen: dict[Any, list[Any]] = {whole: [], model: []}
    with torch.inference_mode():
        model(torch.randn(2, 8))
        for each, notes in seen.items():
            each.second.register_forward_hook(lambda module, args, output, notes=notes: notes.append((args[0], output)))
        states = torch.randn(2, 8)
        torch.testing.assert_close(model(states), whole(states))
        torch.testing.assert_close(seen[model], seen[whole])
        assert seen[model][0][0] is states
        for each in (whole, model):
            each.second.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        for _ in range(2):
            states = torch.randn(2, 8)
            torch.testing.assert_close(model(states), whole(states))
    torch.testing.assert_close(seen[model], seen[whole])


def test_a_weight_may_be_replaced() -> None:
    whole, model = pair()
    with torch.inference_mode():
        model(torch.randn(2, 8))
        for each in (whole, model):
            each.second.weight = nn.Parameter(torch.ones(3, 8))
        states = torch.randn(2, 8)
        torch.testing.assert_close(model(states), whole(states))


def test_layers_without_gain_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with a shared weight, layers of different kinds, and large batches are computed one by one."""
    products = widths_of_products(monkeypatch)
    tied = Pair(lambda input: input)
    tied.second = nn.Linear(8, 5)
    tied.second.weight = tied.first.weight
    other = Pair(lambda input: input)
    other.second = nn.Linear(8, 3, bias=False)
    for model in (tied, other):
        lay_side_by_side(model)
        assert type(model.first) is type(model.second) is nn.Linear
    _, model = pair()
    with torch.inference_mode():
        for rows in (1, MAX_ROWS + 1, MAX_ROWS):
            products.clear()
            model(torch.randn(rows, 8))
            assert products == {1: [5, 3, 8], MAX_ROWS + 1: [5, 3], MAX_ROWS: [8]}[rows]
