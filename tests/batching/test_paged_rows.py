"""Tests that the rows of a batch on CPU take the memory of their own tokens, and get the tokens that they get alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from parallelformers_ng.batching.prefix_cache import PrefixCache
from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.prompts import Prompts
from parallelformers_ng.batching.row import BatchRow
from parallelformers_ng.batching.rows import Rows
from parallelformers_ng.generation import paged_memory
from parallelformers_ng.kernels.installation import install
from tests.helpers.caches_in_place import caches_in_place
from tests.zoo.decoders import decoder, gpt2

PAGE = 4096


@pytest.fixture(autouse=True)
def in_place() -> Iterator[None]:
    """Models that compute the tokens alone run with the same cache methods."""
    with caches_in_place():
        yield


def resident(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of memory behind the mappings that contain some tensors. Linux joins adjacent mappings."""
    is_ours, size = False, 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, *others = line.split()
            if "-" in first and not first.endswith(":"):
                begin, end = (int(each, 16) for each in first.split("-"))
                is_ours = any(begin <= tensor.data_ptr() < end for tensor in tensors)
            elif is_ours and first == "Rss:":
                size += int(others[0]) * 1024
    return size


class Batch:
    """A batch of one rank, and the calls that have joined it."""

    def __init__(self, model: Any) -> None:
        self.model, self.everyone = model, list[BatchRow]()
        prefixes = PrefixCache(300)
        self.prompts, self.rows = Prompts(model, prefixes), Rows(model, None, prefixes)

    def join(self, *calls: tuple[torch.Tensor, int]) -> None:
        for ids, new in calls:
            call = {"input_ids": ids, "max_new_tokens": new, "do_sample": False, "eos_token_id": None}
            self.everyone.append(BatchRow(len(self.everyone), prepare(self.model, call)))
            self.prompts.add(self.everyone[-1])
        while len(self.prompts):
            if results := self.prompts.run(64):
                self.rows.join(results)

    @property
    def states(self) -> list[torch.Tensor]:
        """Keys and values of all layers."""
        store: Any = self.rows._store
        return [states for layer in store.cache.layers for states in (layer.keys, layer.values)]


@pytest.mark.parametrize("make", [gpt2, lambda: decoder("Llama")])
@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_rows_that_come_and_go_get_solo_tokens(make: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 1 to 40 tokens join and leave at random steps. The address space runs out on both sides meanwhile."""
    monkeypatch.setattr(paged_memory, "_MIN_TOKENS", 128)
    monkeypatch.setattr(paged_memory, "_MIN_ROWS", 3)
    monkeypatch.setattr(paged_memory, "_SPARE", 2)
    model, numbers, left = make(), random.Random(seed), set[int]()
    calls = [
        (torch.randint(5, 95, (1, numbers.choice((1, 4, 20, 40))), generator=torch.Generator().manual_seed(number)), 9)
        for number in range(12)
    ]
    want = [model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None) for ids, new in calls]
    install(model)
    batch, waiting = Batch(model), [*calls]
    while waiting or len(batch.rows):
        count = numbers.choice((0, 0, 1, 3))
        batch.join(*waiting[:count])
        del waiting[:count]
        batch.rows.run(numbers.choice((1, 2)))
        if len(batch.rows) > 2 and numbers.random() < 0.2:
            [*_, last] = batch.rows
            batch.rows.leave([last.number])
            left.add(last.number)
    for row, ids in zip(batch.everyone, want, strict=True):
        assert torch.equal(row.ids, ids[:, : row.ids.shape[1]])
        assert row.number in left or row.ids.shape == ids.shape


@torch.inference_mode()
def test_rows_take_the_memory_of_their_own_tokens() -> None:
    """One row of 2,000 tokens and eight short ones: with padding, the keys of a layer would take nine times as much."""
    model = decoder("Llama")
    batch, numbers = Batch(model), torch.Generator().manual_seed(0)
    lengths = [10] * 8 + [2000]
    batch.join(*((torch.randint(5, 95, (1, length), generator=numbers), 30) for length in lengths))
    for _ in range(5):
        batch.rows.run(1)
    states = batch.states
    rows, heads, columns, width = states[0].shape
    of_token = width * states[0].itemsize
    assert (rows, columns) == (9, 2005)
    pages = heads * sum(length * of_token // PAGE + 2 for length in lengths)
    assert resident(states) <= len(states) * pages * PAGE
    batch.rows.leave([8])
    assert resident(states) <= len(states) * heads * 8 * 2 * PAGE, "the memory of the long row is free"
    memory = states[0].untyped_storage().data_ptr()
    batch.rows.run(1)
    batch.join((torch.randint(5, 95, (1, 500), generator=numbers), 3))
    assert batch.states[0].untyped_storage().data_ptr() == memory, "a longer row copies no other row"
