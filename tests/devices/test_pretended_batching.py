"""Tests calls that are decoded together on pretended CUDA devices: see `tests/pretend_cuda`."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from os import kill
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from parallelformers_ng import parallelize
from parallelformers_ng.batching import scheduler
from parallelformers_ng.batching.penalties import Penalties
from parallelformers_ng.batching.ticket import Ticket
from parallelformers_ng.errors import RequestCancelledError, WorkerDiedError
from parallelformers_ng.model.dispatcher import CallOptions
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.model.remote_module import remote_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers.rounds_seen import rows_of_each_round, use_short_pieces
from tests.pretend_cuda.caller import small
from tests.pretend_cuda.ledger import TO_DEVICE, TO_HOST, WAITS
from tests.pretend_cuda.objects import Favours
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder, gpt2

LENGTHS = ((3, 9), (12, 5), (5, 12), (3, 4), (9, 7))


def calls(**more: Any) -> list[dict[str, Any]]:
    ids = text_inputs()["input_ids"].flatten().repeat(2)
    return [
        {"input_ids": ids[None, number : number + before], "max_new_tokens": after, "do_sample": False, **more}
        for number, (before, after) in enumerate(LENGTHS)
    ]


def together(model: Any, specs: list[dict[str, Any]]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(specs)) as pool:
        return list(pool.map(lambda call: model.generate(**call), specs))


def with_window() -> Any:
    """Return a decoder with one layer, whose window is shorter than most prompts."""
    return decoder("Mistral", layers=1, sliding_window=4)


def with_states() -> Any:
    """Return a decoder with a layer of convolutions."""
    return decoder("Lfm2", layer_types=["conv", "full_attention"], block_ff_dim=74)


def test_shared_calls_get_solo_tokens(monkeypatch: pytest.MonkeyPatch, pretended: WorkerGroup) -> None:
    use_short_pieces(monkeypatch, 4)
    for make in (small, gpt2, with_window):
        want = [make().generate(**call) for call in calls()]
        with parallelize(make(), workers=pretended, batching={"rows": 3}) as model:
            pretended.call("graphs")
            got = together(model, calls())
            assert pretended.call("graphs")[1] > 0
            (shared,) = remote_of(model).calls.shared.values()
            assert not shared.trial.why_alone(type(model), model.config)
            assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("make", [small, with_window])
def test_sampled_calls_draw_from_own_streams(make: Any, pretended: WorkerGroup) -> None:
    specs = [{**call, "do_sample": True, "seed": number} for number, call in enumerate(calls())]
    with parallelize(make(), workers=pretended, batching=False) as model:
        want = [model.generate(**call) for call in specs]
    with parallelize(make(), workers=pretended, batching=True) as model:
        assert all(map(torch.equal, together(model, specs), want))


def test_processors_that_hold_tensors(pretended_one: WorkerGroup) -> None:
    bias = torch.randn(131, generator=torch.Generator().manual_seed(5)) * 3
    whole, mine, theirs = small(), [Favours(bias) for _ in LENGTHS], [Favours(bias) for _ in LENGTHS]
    want = [whole.generate(**call, logits_processor=[each]) for each, call in zip(mine, calls(), strict=True)]
    with parallelize(small(), workers=pretended_one, batching=True) as model:
        specs = [{**call, "logits_processor": [each]} for each, call in zip(theirs, calls(), strict=True)]
        assert all(map(torch.equal, together(model, specs), want))
    assert [len(each.sums) for each in theirs] == [len(each.sums) for each in mine]
    assert {each.total.device.type for each in theirs} == {"cpu"}


CALLERS = 16
ALONE = "its decode steps do not become CUDA graphs"
PROCESSOR = {"min_new_tokens": 24}
PENALTIES = {"logits_processor": [Penalties(2, 0.5, 0.3, repetition=1.2, bias=((7, 2.0), (9, -1.0)))]}


def long_calls(new: int, **more: Any) -> list[dict[str, Any]]:
    """Return 16 calls with prompts of 2 to 8 tokens and `new` further tokens."""
    ids = text_inputs()["input_ids"].flatten().repeat(CALLERS)
    prompts = [ids[None, number : number + 2 + number % 7] for number in range(CALLERS)]
    options = {"max_new_tokens": new, "eos_token_id": None, "do_sample": False, **more}
    return [{"input_ids": prompt, **options} for prompt in prompts]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("more", [{}, PROCESSOR, PENALTIES], ids=["greedy", "processor", "penalties"])
def test_step_of_16_rows_copies_and_waits_once(more: Any, ranks: int, pretended_groups: Any) -> None:
    group = pretended_groups(ranks)
    specs = long_calls(24, **more)
    want = [small().generate(**call) for call in specs]
    with parallelize(small(), workers=group, batching={"rows": CALLERS}) as model:
        for _ in range(2):  # steps are recorded in the first round
            group.call("steps_of_rows")
            group.call("rounds_of_rows")
            assert all(map(torch.equal, together(model, specs), want))
        steps = [counts for rows, counts in group.call("steps_of_rows") if rows == CALLERS]
        assert len(steps) >= 8
        each = int(more is PENALTIES)  # their numbers are copied in each step, and newest tokens only after joins
        # A row ends in the last step, or in the one before it, if the last one was launched meanwhile.
        copies = [counts.get(TO_DEVICE, 0) - each for counts in steps[:-2]]
        assert max(copies) <= 1
        assert sum(copies) <= 2
        assert {counts[WAITS] for counts in steps[:-2]} == {1}
        assert sum(counts[TO_HOST] for counts in steps[:-2]) - len(steps[:-2]) in (0, 1)  # 1 for a step that is ahead
        assert all(counts["not awaited"] for counts in steps if counts["later"])
        assert more is not PENALTIES or not any(counts["later"] for counts in steps)  # the host chooses the tokens
        for count, counts in group.call("rounds_of_rows"):  # after a round, ranks agree
            assert counts.get(TO_DEVICE, 0) <= 1
            assert counts[WAITS] <= count + ranks - 1 + bool(more)


def test_rows_end_after_the_next_step_was_launched(pretended_one: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row ends at a token of its own, so the launched step has computed one more token for it. Later calls begin
    with the sequences, whose keys and values are kept."""
    monkeypatch.setattr(scheduler, "_ROUND_SECONDS", 9.0)  # rounds of several steps, also on a slow machine
    specs, whole = [*long_calls(30)[:3], *long_calls(7)[3:4]], small()
    for number, call in enumerate(specs[:3]):
        new = whole.generate(**call)[0, call["input_ids"].shape[1] :].tolist()
        call["eos_token_id"] = new[5 + 4 * number]
    want = [whole.generate(**call) for call in specs]
    assert len({each.shape[1] for each in want}) > 2
    further = [{**call, "input_ids": torch.cat((ids, ids[:, :2]), -1)} for call, ids in zip(specs, want, strict=True)]
    want_further = [whole.generate(**call) for call in further]
    with parallelize(small(), workers=pretended_one, batching={"rows": 4}) as model:
        for _ in range(3):
            pretended_one.call("steps_of_rows")
            assert all(map(torch.equal, together(model, specs), want))
            assert any(counts["later"] for _, counts in pretended_one.call("steps_of_rows"))
            assert all(
                torch.equal(model.generate(**call), ids) for call, ids in zip(further, want_further, strict=True)
            )


class Announces(BaseStreamer):
    """A streamer that sets an event at a token."""

    def __init__(self, at: int) -> None:
        self.left, self.reached = at, threading.Event()

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left <= 0:
            self.reached.set()

    def end(self) -> None:
        pass


def test_position_out_of_range_fails_while_others_run(pretended_one: WorkerGroup) -> None:
    """GPT-2 has 64 positions here. The step that has none is found although its batch is always a step ahead."""
    specs, lost = long_calls(55)[:3], long_calls(63)[3]
    want, begun = [gpt2().generate(**call) for call in specs], Announces(9)
    with parallelize(gpt2(), workers=pretended_one, batching={"rows": 4}) as model:
        together(model, specs)  # steps are recorded
        with ThreadPoolExecutor(3) as pool:
            results = [pool.submit(model.generate, **call, streamer=begun) for call in specs]
            assert begun.reached.wait(60)
            counted = Announces(1000)
            with pytest.raises(IndexError, match=r"id 64, vocabulary of 64$"):
                model.generate(**lost, streamer=counted)
            assert 1000 - counted.left <= 1 + 64 - lost["input_ids"].shape[1] + 1  # the prompt, and what follows it
            assert all(map(torch.equal, [each.result() for each in results], want))


def test_row_ends_at_the_last_position(pretended_one: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after it, which is launched before its last token is read, has no position for it."""
    failures = []
    monkeypatch.setattr(Ticket, "begin_again", lambda self, error, suspected: failures.append(error))
    first, other = long_calls(59)[4], long_calls(50)[0]
    assert first["input_ids"].shape[1] + 59 == 64 + 1
    want, begun = [gpt2().generate(**call) for call in (first, other)], Announces(20)
    with parallelize(gpt2(), workers=pretended_one, batching={"rows": 2}) as model:
        together(model, [first, other])  # steps are recorded
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(model.generate, **first, streamer=begun)
            assert begun.reached.wait(60)
            assert torch.equal(model.generate(**other), want[1])
            assert torch.equal(result.result(), want[0])
        assert not failures


class Cancels(BaseStreamer):
    """A streamer that cancels its call at a token."""

    def __init__(self, at: int) -> None:
        self.left = at

    def put(self, value: torch.Tensor) -> None:
        self.left -= value.ndim == 1
        if not self.left:
            raise RequestCancelledError("enough")

    def end(self) -> None:
        pass


def test_callers_come_and_go_despite_killed_worker(pretended: WorkerGroup, tmp_path: Path) -> None:
    """16 callers for a while. Each call gets its solo tokens, or the error that it asked for, or the worker's death."""
    lengths = [4 + 7 * number % 40 for number in range(CALLERS)]
    specs = [{**call, "max_new_tokens": new} for call, new in zip(long_calls(1), lengths, strict=True)]
    want = [small().generate(**call) for call in specs]
    killed, deaths = threading.Event(), []

    def calls_of(caller: int) -> None:
        numbers = random.Random(caller)
        for turn in range(6):
            number = numbers.randrange(CALLERS)
            if caller == 0 and turn == 3:
                kill(deployment_of(model).pids[1], signal.SIGKILL)
                killed.set()
            try:
                if numbers.random() < 0.25:
                    with pytest.raises(RequestCancelledError):
                        model.generate(**specs[number], streamer=Cancels(numbers.randint(1, 3)))
                else:
                    assert torch.equal(model.generate(**specs[number], timeout=60), want[number]), number
            except WorkerDiedError as error:
                deaths.append(error)

    small().save_pretrained(tmp_path)  # the second group reads its weights from files
    with parallelize(tmp_path, 2, workers={"device": "cuda"}, batching=True) as model:
        with ThreadPoolExecutor(CALLERS) as pool:
            for each in [pool.submit(calls_of, caller) for caller in range(CALLERS)]:
                each.result(timeout=120)
        assert killed.is_set()
        assert len(deaths) <= CALLERS
        assert deployment_of(model).incarnation == 1
        assert torch.equal(model.generate(**specs[0]), want[0])


def test_batching_is_the_default_if_steps_are_captured(pretended_one: WorkerGroup) -> None:
    specs = long_calls(30)[:2]
    want = [small().generate(**call) for call in specs]
    with parallelize(small(), workers=pretended_one) as model:
        most, end = rows_of_each_round(model), time.monotonic() + 60
        while max(most) < 2:
            assert time.monotonic() < end
            assert all(map(torch.equal, together(model, specs), want))


@pytest.mark.parametrize("fault", ["states", "eager"])
def test_batching_is_off_by_default_without_captured_steps(fault: str, pretended_one: WorkerGroup) -> None:
    """A cache with states of convolutions cannot be static; the first batch shows it."""
    make = with_states if fault == "states" else small
    specs = long_calls(30)[:2]
    want = [make().generate(**call) for call in specs]
    with parallelize(make(), workers=pretended_one, decode="eager" if fault == "eager" else "auto") as model:
        shared = [*remote_of(model).calls.shared.values()]
        assert bool(shared) == (fault == "states")
        end = time.monotonic() + 60
        while shared and shared[0].generate(model, specs[0], CallOptions(timeout=60), None) != ALONE:
            assert time.monotonic() < end
            assert all(map(torch.equal, together(model, specs), want))
        assert all(map(torch.equal, together(model, specs), want))
