"""Tests that requested attention weights have all heads, and that unrequested attention weights cause no exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, CompileConfig
from transformers.cache_utils import Cache

from parallelformers_ng import parallelize
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.heads import own_part
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.own_heads import OwnHeads
from tests.generation.test_generate import assert_same
from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, text_inputs, token_ids
from tests.zoo.decoders import decoder
from tests.zoo.encoders import encoder, xlnet
from tests.zoo.seq2seq import t5
from tests.zoo.vision_audio import clip

Groups = Callable[[int], WorkerGroup]


def eager(model: Any) -> Any:
    """Set the attention implementation that returns weights."""
    model.set_attn_implementation("eager")
    return model


def by_sub_configuration(model: Any) -> Any:
    model.config.text_config.output_attentions = True
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    return model(**text_inputs(), pixel_values=pixels)


def by_position(model: Any) -> Any:
    return model(token_ids(), None, None, None, None, None, True)


def by_position_in_xlnet(model: Any) -> Any:
    return model(token_ids(), *[None] * 9, True)


def by_one(model: Any) -> Any:
    return model(token_ids(), output_attentions=1)


def of_two_streams(model: Any) -> Any:
    target_mapping = torch.zeros(2, 1, 7)
    target_mapping[:, 0, -1] = 1
    return model(token_ids(), target_mapping=target_mapping, output_attentions=True)


def by_generation_configuration(model: Any) -> Any:
    model.generation_config.output_attentions = True
    return model.generate(**text_inputs(), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)


def of_a_part(model: Any) -> Any:
    states = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(3))
    return model.encoder.block[0](states)


ASKED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a sub-configuration": (clip, by_sub_configuration),
    "position": (lambda: encoder("Deberta"), by_position),
    "position in XLNet": (xlnet, by_position_in_xlnet),
    "1": (lambda: encoder("Bert"), by_one),
    "1 of a decoder": (lambda: decoder("Llama"), by_one),
    "two streams": (xlnet, of_two_streams),
    "generation configuration": (lambda: decoder("Llama"), by_generation_configuration),
    "a position bias that a block hands on": (t5, of_a_part),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("make", "ask"), ASKED.values(), ids=ASKED)
def test_weights_of_all_heads(
    make: Callable[[], Any], ask: Callable[[Any], Any], world_size: int, groups: Groups
) -> None:
    whole, model = eager(make()), eager(make())
    with torch.no_grad():
        want = ask(whole)
    with parallelize(model, workers=groups(world_size)):
        got = ask(model)
    assert_same(_tensors(got), _tensors(want))
    assert _attentions(want)
    if isinstance(want, dict):
        assert got.keys() == want.keys()


class Rollout(BertModel):
    """A model that uses attention weights itself: attention rollout over all heads and layers."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids, output_attentions=True, **kwargs)
        flow = torch.eye(input_ids.shape[1])
        for weights in output.attentions:
            flow = weights.detach()[:, 1:].amax(dim=1) @ flow
        return {"flow": flow, "halves": [torch.stack([weights])[0, :, ::2] for weights in output.attentions]}


def test_modelling_code_may_read_the_weights(groups: Groups) -> None:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=74,
        max_position_embeddings=64,
    )  # fmt: skip
    whole, model = (build(Rollout, config, attention="eager") for _ in range(2))
    with torch.no_grad():
        want = whole(token_ids())
    with parallelize(model, workers=groups(2)):
        assert_same(model(token_ids()), want)


class Counting:
    """A communicator that counts its collectives."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name in ("all_reduce", "all_gather"):
            self.calls[name] += 1
        return getattr(self.inner, name)


def collectives(model: Any, use: Callable[[Any], Any]) -> Counter[str]:
    """Return the number of collectives of two ranks for one use of the model, by kind."""
    plan = build_plan(model, 2, select(model))

    def on_rank(communicator: Communicator) -> Counter[str]:
        counting: Any = Counting(communicator)
        share = cut(model, plan, communicator.rank, counting)
        counting.calls.clear()
        with torch.inference_mode():
            use(share)
        return counting.calls

    first, second = run_ranks(2, on_rank)
    assert first == second
    return first


def decode(model: Any) -> None:
    model.generate(**text_inputs(), max_new_tokens=4, do_sample=False)


def encode(model: Any) -> None:
    model(**text_inputs())


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: decoder("Llama"), decode),
        (t5, decode),
        (lambda: encoder("Bert"), encode),
        (lambda: encoder("Deberta"), encode),
        (lambda: encoder("Longformer", attention_window=4, attention="eager"), encode),
    ],
    ids=["llama", "t5", "bert", "deberta", "longformer"],
)
def test_unrequested_weights_are_not_exchanged(make: Callable[[], Any], use: Callable[[Any], Any]) -> None:
    """Eager attention returns weights also without a request. Unrequested weights are dropped before any code reads
    them."""
    model = eager(make())

    def without(share: Any) -> None:
        for module in share.modules():
            if hasattr(module, "weights_at"):
                module.weights_at = ()
        use(share)

    assert collectives(model, use) == collectives(model, without)


@pytest.mark.slow  # compiles for long
def test_compiled_step_returns_weights_of_all_heads(groups: Groups) -> None:
    whole, options = eager(decoder("Llama")), {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    want = whole.generate(**text_inputs(), **options, output_attentions=True, cache_implementation="static")
    traced = CompileConfig(backend="eager", mode=None, fullgraph=True)
    with parallelize(eager(decoder("Llama")), workers=groups(2), decode=traced) as model:
        got = model.generate(**text_inputs(), **options, output_attentions=True)
        assert torch.equal(got.sequences, want.sequences)
        assert_same(got.attentions, want.attentions)
        assert torch.equal(model.generate(**text_inputs(), **options).sequences, want.sequences)


class Hidden(BertModel):
    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return SimpleNamespace(kept=super().forward(input_ids, output_attentions=True).attentions)


def test_weights_within_unknown_objects_are_refused(groups: Groups) -> None:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
    )
    with parallelize(build(Hidden, config, attention="eager"), workers=groups(2)) as model:
        with pytest.raises(ParallelError, match="from which ranks cannot gather all heads"):
            model(token_ids())
        assert model.get_input_embeddings()(token_ids()).shape == (2, 7, 32)  # the ranks continue


def test_heads_are_gathered_once_attention_reads_own() -> None:
    times: list[int] = []
    own = torch.rand(1, 2, 3, 3)

    def gather() -> torch.Tensor:
        times.append(1)
        return torch.cat([own, own + 1], dim=1)

    marked = OwnHeads(own, 1, [2, 2], gather)
    assert marked.shape == (1, 4, 3, 3)
    assert marked.dtype is own.dtype
    assert own_part(marked) is own
    assert not times
    assert torch.equal(marked[:, 2:], own + 1)
    assert torch.equal(torch.stack([marked]).mean((0, 2)), torch.cat([own, own + 1], 1).mean(1))
    assert nn.functional.dropout(marked, training=False).shape == marked.shape
    assert times == [1]


def _tensors(output: Any) -> list[Any]:
    """Return the values of an output, except for caches."""
    values = output.values() if isinstance(output, dict) else output
    return [value for value in values if not isinstance(value, Cache)]


def _attentions(output: Any) -> list[Any]:
    """Return the attentions of an output: values by name, or tensors with heads if it has no names."""
    if not isinstance(output, dict):
        return [value for value in output if isinstance(value, torch.Tensor) and value.ndim == 4]
    inner = [tensor for value in output.values() if isinstance(value, dict) for tensor in _attentions(value)]
    return inner + [value for name, value in output.items() if "attentions" in name and value]
