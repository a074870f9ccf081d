"""Tests kinds of calls on ranks that share one card over NCCL: beams, sampling, concurrent callers, adapters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from parallelformers_ng import parallelize
from tests.devices.one_card.expected import greedy, without_ties
from tests.devices.one_card.place import Place, slow
from tests.helpers.cancelling_streamer import Cancels
from tests.zoo.decoders import decoder, gpt2
from tests.zoo.seq2seq import t5

FAMILIES = {"llama": lambda: decoder("Llama"), "gpt2": gpt2, "t5": t5}


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_beams_equal_the_plain_model(family: str, place: Place) -> None:
    whole = FAMILIES[family]()
    inputs, want = without_ties(whole, 10, beams=3)
    with parallelize(FAMILIES[family](), workers=place.group(2)) as model:
        for _ in range(2):
            assert torch.equal(greedy(model, inputs, 10, num_beams=3), want)


@slow
def test_a_seed_repeats_sampled_tokens(place: Place) -> None:
    """A device draws otherwise than the CPU, so the plain model only says which tokens could be drawn: its best 5."""
    whole, tokens = decoder("Llama"), 16
    ids = torch.arange(3, 10)[None]
    sampling = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "top_k": 5}
    drawn = []
    for decode in ("auto", "eager"):
        with parallelize(decoder("Llama"), workers=place.group(3), decode=decode) as model:
            drawn += [model.generate(ids, seed=seed, **sampling) for seed in (5, 5, 6, 5)]
    first, _, other, *_ = drawn
    assert all(torch.equal(each, first) for number, each in enumerate(drawn) if number % 4 != 2)
    assert not torch.equal(first, other)
    with torch.no_grad():
        best = whole(first[:, :-1]).logits[:, -tokens:].topk(6).indices  # one more for a close decision
    assert (best == first[:, -tokens:, None]).any(-1).all()


def _unlike_calls(count: int) -> list[dict[str, Any]]:
    calls = []
    for number in range(count):
        ids = torch.arange(2 + number % 7)[None].mul(5 + number).remainder(120) + 3
        new = 9 + 4 * number % 25
        calls.append({"input_ids": ids, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False})
    return calls


@slow
def test_unlike_callers_share_steps_and_cancel(place: Place) -> None:
    """Each fourth of 16 callers cancels its call. Three bursts: recorded, replayed, with prompts of earlier bursts."""
    whole, calls = decoder("Llama"), _unlike_calls(16)
    want = [whole.generate(**call) for call in calls]

    def generate(number: int) -> bool:
        if number % 4 < 3:
            return torch.equal(model.generate(**calls[number]), want[number])
        with pytest.raises(InterruptedError, match="enough of it"):
            model.generate(**calls[number], streamer=Cancels(1 + number % 5))
        return True

    with (
        parallelize(decoder("Llama"), workers=place.group(2), batching={"rows": 8}) as model,
        ThreadPoolExecutor(len(calls)) as pool,
    ):
        for _ in range(3):
            assert [*pool.map(generate, range(len(calls)))] == [True] * len(calls)


@slow
def test_adapters_equal_the_plain_model(place: Place) -> None:
    """The packages that the test needs beside the library's: peft."""
    from tests.helpers.adapters import adapted

    whole = adapted(decoder("Llama"))
    inputs, want = without_ties(whole, 8)
    with whole.disable_adapter():
        without = greedy(whole, inputs, 8)
    with parallelize(adapted(decoder("Llama")), workers=place.group(2)) as model:
        for _ in range(2):
            assert torch.equal(greedy(model, inputs, 8), want)
        with model.disable_adapter():
            assert torch.equal(greedy(model, inputs, 8), without)
