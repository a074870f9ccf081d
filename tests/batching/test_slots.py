"""Tests the slots of a static cache that hold the rows of a batch, with recorded steps on the CPU."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelformers_ng.batching.batch import Batch
from parallelformers_ng.batching.prefix_cache import PrefixCache
from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.prompts import Prompts
from parallelformers_ng.batching.row import BatchRow
from parallelformers_ng.batching.rows import Rows
from parallelformers_ng.batching.slots import CapturedRows, Slots
from parallelformers_ng.cuda_graphs.captured import CapturedSteps
from parallelformers_ng.cuda_graphs.modes import CAPTURED, MAX_POSITIONS, static_generation
from parallelformers_ng.errors import WorkerError
from parallelformers_ng.options import BatchingOptions
from tests.batching.test_batching import ALONE
from tests.helpers.operator_recorder import OperatorRecorder
from tests.zoo.case import VOCABULARY, Case
from tests.zoo.decoders import decoder, gpt2
from tests.zoo.families import CASES, NEWER

ROWS = 16
MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: decoder("Llama"),
    "GPT2": gpt2,
    "Mistral": lambda: decoder("Mistral", sliding_window=12),
}
FAMILIES = [*CASES, *(case for case in NEWER if case.name in ("gpt-oss", "llama4", "gemma4", "mistral3"))]


class Decoded:
    """A batch of one rank whose steps are recorded, and the tokens that each call gets alone."""

    def __init__(self, model: Any) -> None:
        alone: Any = SimpleNamespace(world_size=1, before_reset=lambda _: None, launching=contextlib.nullcontext)
        self.recorder: Any = OperatorRecorder()
        self.steps = CapturedSteps(self.recorder, alone)
        self.captured, prefixes = CapturedRows(model, lambda: self.steps), PrefixCache(2000)
        self.rows, self.prompts = Rows(model, None, prefixes, self.captured), Prompts(model, prefixes)
        self.finished: list[BatchRow] = []
        if model.generation_config.pad_token_id is None:
            model.generation_config.pad_token_id = 0
        self._model, self._numbers = model, torch.Generator().manual_seed(1)

    def join(self, *lengths: int, new: int = 40) -> None:
        """Add a call for each number of prompt tokens."""
        for length in lengths:
            ids = torch.randint(5, VOCABULARY, (1, length), generator=self._numbers)
            call = {"input_ids": ids, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            call["eos_token_id"] = None
            self.finished.append(BatchRow(len(self.finished), prepare(self._model, call)))
            self.prompts.add(self.finished[-1])
        while len(self.prompts):
            if prefill := self.prompts.run(1000):
                self.rows.join(prefill)

    def step(self, positions: int = MAX_POSITIONS) -> None:
        self.rows.run(1, positions, ROWS)

    def check(self, left: Collection[int] = ()) -> None:
        """Assert that each call has the tokens that it gets alone; calls that left have the first of these tokens."""
        for row in self.finished:
            length = row.call.config.max_length - row.call.input_ids.shape[1]
            whole = self._model.generate(
                row.call.input_ids, max_new_tokens=length, min_new_tokens=length, do_sample=False, eos_token_id=None
            )
            got = row.ids
            assert got.shape == whole.shape or row.number in left
            assert torch.equal(got, whole[:, : got.shape[1]]), row.number


class Reads(TorchDispatchMode):
    """A counter of the elements that operators read from some memory.

    Attributes:
        count: number of elements.
    """

    def __init__(self, memory: list[torch.Tensor]) -> None:
        super().__init__()
        self.count = 0
        self._storages = {each.untyped_storage()._cdata for each in memory}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            output = func.decompose(*args, **(kwargs or {}))
        if output is not NotImplemented:
            return output
        written = [each.alias_info is not None for each in func._schema.arguments]  # also views
        for value, is_written in zip(args, written, strict=False):
            tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
            if not is_written:
                self.count += sum(each.numel() for each in tensors if each.untyped_storage()._cdata in self._storages)
        return func(*args, **(kwargs or {}))


def memory_of(decoded: Decoded) -> list[torch.Tensor]:
    assert isinstance(decoded.rows._store, Slots)
    return [tensor for pair in decoded.rows._store._memory for tensor in pair]


@torch.inference_mode()
def test_joins_and_leaves_copy_no_other_row() -> None:
    decoded = Decoded(decoder("Llama"))
    decoded.join(20)
    decoded.step()
    memory = memory_of(decoded)
    with Reads(memory) as reads:
        for number in range(1, ROWS):
            decoded.join(number)
        decoded.rows.leave([3, 7])
        decoded.join(5, 8)
        assert reads.count == 0
    decoded.step()
    assert memory_of(decoded)[0] is memory[0]
    with Reads(memory) as reads:
        decoded.rows.leave([1])
        decoded.join(60)  # a prompt longer than all rows
        assert reads.count > 0
    while len(decoded.rows):
        decoded.step()
    decoded.check({1, 3, 7})


@torch.inference_mode()
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_rows_of_any_length_get_solo_tokens(make: Callable[[], Any]) -> None:
    """Rows join and leave at random steps. Columns run out, and recordings are deleted meanwhile."""
    model, numbers, left = make(), random.Random(3), set[int]()
    longest = 60 if model.config.model_type == "gpt2" else 300
    decoded = Decoded(model)
    for step in range(150):
        if numbers.random() < 0.3 and len(decoded.rows) < ROWS - 2:
            lengths = [numbers.choice([2, 9, longest // 3]) for _ in range(numbers.randint(1, 2))]
            decoded.join(*lengths, new=numbers.choice([1, 7, longest // 2]))
        if len(decoded.rows):
            if step % 37 == 36:
                decoded.steps.forget()
            if step % 20 == 19:
                left.add(next(iter(decoded.rows)).number)
                decoded.rows.leave(left)
        if len(decoded.rows):
            decoded.step(0 if step % 50 == 49 else MAX_POSITIONS)
    while len(decoded.rows):
        decoded.step()
    assert decoded.recorder.replays > 100
    assert not decoded.captured.reason
    decoded.check(left)


@torch.inference_mode()
def test_columns_run_out_rarely() -> None:
    """Rows of 20 tokens come and go for 400 steps; the columns are used again and again."""
    decoded = Decoded(decoder("Llama"))
    stores = set[int]()
    for step in range(400):
        if step % 5 == 0:
            decoded.join(8, new=12)
        decoded.step()
        stores.add(id(decoded.rows._store))
        if step == 0:
            length = memory_of(decoded)[0].shape[2]
    assert length == memory_of(decoded)[0].shape[2] == 128
    assert 2 <= len(stores) <= 6
    decoded.check({row.number for row in decoded.rows})


@torch.inference_mode()
def test_infinities_of_earlier_rows_do_not_spread() -> None:
    decoded = Decoded(decoder("Llama"))
    decoded.join(20, 20)
    decoded.step()
    for tensor in memory_of(decoded):
        tensor[1] = torch.inf
    decoded.rows.leave([1])
    decoded.join(9)
    while len(decoded.rows):
        decoded.step()
    decoded.check({1})


@torch.inference_mode()
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in FAMILIES if case.generates])
def test_families_get_solo_tokens_in_slots(case: Case) -> None:
    model = case.make()
    if case.name in ALONE or model.config.is_encoder_decoder or "input_ids" not in case.inputs():
        pytest.skip("calls share no batch")
    if static_generation(model, {"max_new_tokens": 1}, CAPTURED)[1]:
        pytest.skip("steps are not captured")
    decoded = Decoded(model)
    decoded.join(9, 4, new=6)
    for _ in range(3):
        decoded.step()
    decoded.join(5, 15, new=9)
    while len(decoded.rows):
        decoded.step()
    reason = decoded.captured.reason  # one step of falcon waits; in transformers 5.17, BLOOM makes a number a tensor
    assert reason in ("", "a tensor is made of Python numbers") or "lift_fresh" in reason
    assert bool(decoded.recorder.replays) != bool(reason)
    decoded.check()


@torch.inference_mode()
def test_batches_keep_one_static_cache() -> None:
    """Slots for 16 rows of 2,000 tokens would have too many positions, so there are fewer."""
    decoded = Decoded(decoder("Llama"))
    decoded.join(5, new=3)
    decoded.step()
    assert memory_of(decoded)[0].shape[::2] == (16, 128)
    decoded.join(2000, new=6)
    decoded.step()
    assert memory_of(decoded)[0].shape[::2] == (4, 4096)
    decoded.join(*[3] * 4, new=3)  # more rows than slots
    decoded.step()
    assert not isinstance(decoded.rows._store, Slots)
    decoded.step(1 << 15)
    assert memory_of(decoded)[0].shape[::2] == (8, 4096)
    assert len(decoded.steps._caches) == 1
    while len(decoded.rows):
        decoded.step(1 << 15)
    decoded.check()


@torch.inference_mode()
def test_fewer_rows_use_the_larger_cache_again() -> None:
    """Its recordings stay: a new cache would need new ones."""
    decoded = Decoded(decoder("Llama"))
    for lengths in ((2000, 5, 5, 5, 5), (2000, 5), (2000, 5, 5, 5, 5), (2000, 5)):
        decoded.join(*lengths, new=6)
        decoded.step(1 << 15)
        assert memory_of(decoded)[0].shape[::2] == (8, 4096)
        while len(decoded.rows):
            decoded.step(1 << 15)
        recorded = len(decoded.steps._caches[8].steps)
    decoded.check()
    assert len(decoded.steps._caches[8].steps) == recorded


STANDING = {"prompt_tokens": 3, "tokens_needed": 9, "priority": 0, "adapters": None, "update": None}
STANDING |= dict.fromkeys(("decodes", "streams", "given_up", "is_suspect", "needs_solitude"), False)


def test_full_device_gets_shorter_passes_first(caplog: pytest.LogCaptureFixture) -> None:
    """A pass of many prompt tokens may have taken the memory. Only the next error ends the recordings."""
    group: Any = SimpleNamespace(
        submit=lambda request: None, do_later=lambda action: action(), device="cuda", timeout=60.0
    )
    batch = Batch(BatchingOptions(), SimpleNamespace(in_chunks=True), group, CAPTURED)  # type: ignore[arg-type]
    error = torch.OutOfMemoryError("CUDA out of memory")
    error.__class__ = type("OutOfMemory", (torch.OutOfMemoryError, WorkerError), {})
    call = SimpleNamespace(seed=None)
    again: list[bool] = []

    def begin_again(error: BaseException, suspected: bool) -> bool:
        again.append(suspected)
        return True

    ticket: Any = SimpleNamespace(**STANDING, call=call, has_output=False)
    ticket.parcel, ticket.positions, ticket.begin_again = (b"", 0), MAX_POSITIONS, begin_again
    batch.add(ticket, ())
    seen = []
    for _ in range(2):
        order = batch.next_round()
        assert order is not None
        seen.append((order.schedule.max_tokens, order.positions > 0))
        batch.fail(error, order)
    order = batch.next_round()
    assert order is not None
    assert [*seen, (order.schedule.max_tokens, order.positions > 0)] == [(4096, True), (1024, True), (1024, False)]
    assert caplog.messages == ["calls that are decoded together run without CUDA graphs: CUDA out of memory"]
    assert again == [False, False]


def test_measured_memory_bounds_recorded_steps() -> None:
    """Steps over a larger cache than by default are recorded if the memory for the rows allows it."""
    group: Any = SimpleNamespace(submit=lambda request: None, device="cpu", timeout=60.0)
    trial: Any = SimpleNamespace(in_chunks=False)
    for tokens, positions in ((1000, MAX_POSITIONS), (50_000, 50_000), (None, MAX_POSITIONS)):
        batch = Batch(BatchingOptions(cache_tokens=tokens), trial, group, CAPTURED)
        ticket: Any = SimpleNamespace(**STANDING, call=SimpleNamespace(seed=None))
        ticket.parcel, ticket.positions = (b"", 0), MAX_POSITIONS
        batch.add(ticket, ())
        order = batch.next_round()
        assert order is not None
        assert (order.positions, order.max_rows) == (positions, 16)
