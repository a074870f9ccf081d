"""Tests that concurrent calls of many threads, decoded together, get the same tokens as calls that run alone."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

from parallelformers_ng import (
    BatchingError,
    ParallelError,
    RequestTimeoutError,
    WorkerDiedError,
    WorkerError,
    parallelize,
)
from parallelformers_ng.batching import batch_proof as proof
from parallelformers_ng.batching import prompts as prompts_of_a_batch
from parallelformers_ng.batching import scheduler
from parallelformers_ng.batching.batch import Batch
from parallelformers_ng.batching.prefix_cache import PrefixCache
from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.prompts import Prompts
from parallelformers_ng.batching.round_messages import Round, Schedule
from parallelformers_ng.batching.rounds import RankBatch
from parallelformers_ng.batching.row import BatchRow
from parallelformers_ng.batching.rows import Rows
from parallelformers_ng.batching.sharing import shared_call
from parallelformers_ng.batching.ticket import Ticket
from parallelformers_ng.errors import GroupError
from parallelformers_ng.generation.object_state import ObjectState
from parallelformers_ng.kernels import decoder_stack
from parallelformers_ng.kernels.installation import install
from parallelformers_ng.kernels.operators import _decode
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.model.remote_module import remote_of
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.sharding.cache_names import CACHE
from tests.helpers.patience import PROMPTLY, await_end, kill
from tests.helpers.rounds_seen import rows_of_each_round, use_short_pieces
from tests.zoo.decoders import bloom, decoder, gpt2
from tests.zoo.families import CASES, NEWER

FAMILIES = {"llama": lambda: decoder("Llama", tied=True), "gpt2": gpt2, "bloom": bloom}
FAMILIES |= {case.name: case.make for case in NEWER if case.name in ("mamba2", "qwen3-next")}  # with states
ALONE = {"roformer-causal", "bart-causal", "reformer"}
"""Families whose calls run alone: they count positions from the longest row, or their cache depends on the sequence's
length."""


def calls(count: int) -> list[dict[str, Any]]:
    """Return `count` calls with prompts and lengths of all kinds, some sampled with a seed, some with special
    settings."""
    numbers = torch.Generator().manual_seed(7)
    specs = []
    for number in range(count):
        length = int(torch.randint(1, 12, (), generator=numbers))
        call: dict[str, Any] = {
            "input_ids": torch.randint(5, 95, (1, length), generator=numbers),
            "max_new_tokens": int(torch.randint(1, 14, (), generator=numbers)),
            "do_sample": False,
        }
        if number % 3 == 1:
            call |= {"do_sample": True, "seed": number, "top_k": 20, "temperature": 0.7}
        if number % 4 == 2:
            call |= {"repetition_penalty": 1.3, "eos_token_id": list(range(40, 60))}
        specs.append(call)
    return specs


def alone(model: Any, call: dict[str, Any]) -> torch.Tensor:
    call = dict(call)
    if (seed := call.pop("seed", None)) is not None:
        torch.manual_seed(seed)
    return model.generate(**call)


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3-next", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bloom", "mamba2"))],
)
def test_shared_calls_get_tokens_of_solo_runs(monkeypatch, family, groups):
    use_short_pieces(monkeypatch, 8)
    whole, specs = FAMILIES[family](), calls(40 if family == "llama" else 16)
    want = [alone(whole, call) for call in specs]
    with parallelize(FAMILIES[family](), workers=groups(2), batching={"rows": 6}) as model:
        most = rows_of_each_round(model)
        with ThreadPoolExecutor(16) as pool:
            got = list(pool.map(lambda call: model.generate(**call), specs))
    assert all(map(torch.equal, got, want))
    assert max(most) > 1, "no two calls were decoded together"
    assert max(most) <= 6


TRIED = ALONE | {"mistral", "gemma2", "qwen3", "mixtral", "falcon", "mpt", "opt"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case.name not in TRIED), id=case.name)
        for case in CASES
        if case.generates
    ],
)
def test_the_proof_tells_which_models_may_share(case):
    model = case.make()
    if model.config.is_encoder_decoder or "input_ids" not in case.inputs():
        pytest.skip("decoders of text alone")
    # In some releases XLM has a cache, and drops the mask and the positions that rows of a batch need.
    alone = case.name in ALONE or (case.name == "xlm-causal" and CACHE in inspect.signature(model.forward).parameters)
    assert all(proof.why_alone(model, in_chunks) for in_chunks in (True, False)) == alone


def test_cache_positions_are_those_of_the_rows(monkeypatch):
    model = decoder("Llama")
    prepared = model.prepare_inputs_for_generation
    monkeypatch.setattr(
        model,
        "prepare_inputs_for_generation",
        lambda *args, **kwargs: {**prepared(*args, **kwargs), "position_ids": None},
    )
    assert [proof.why_alone(model, in_chunks) for in_chunks in (True, False)] == ["", ""]


class Pieces(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.threads: set[int] = set()

    def put(self, value: torch.Tensor) -> None:
        self.threads.add(threading.get_ident())
        self.pieces.append(value)

    def end(self) -> None:
        self.pieces.append(None)


def test_streamer_is_called_in_its_callers_thread(groups):
    local, remote, prompt = Pieces(), Pieces(), torch.tensor([[5, 6, 7]])
    gpt2().generate(prompt, streamer=local, max_new_tokens=7, do_sample=False)
    with parallelize(gpt2(), workers=groups(2), batching=True) as model:
        model.generate(prompt, streamer=remote, max_new_tokens=7, do_sample=False)
    assert remote.threads == {threading.get_ident()}
    assert remote.pieces.pop() is local.pieces.pop() is None
    assert all(map(torch.equal, remote.pieces, local.pieces))


class OtherAfterPickling(StoppingCriteria):
    """Criterion whose copy on a rank has fewer objects than the caller's, so that the ranks refuse it."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"lengths": None}

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.lengths.append(ids.shape[1])
        return torch.tensor([False])


def test_refused_call_streams_its_prompt_once(groups, caplog):
    prompt = torch.tensor([[5, 6, 7]])
    local, remote = Pieces(), Pieces()
    gpt2().generate(prompt, streamer=local, max_new_tokens=4, do_sample=False)
    with parallelize(gpt2(), workers=groups(2), batching=True) as model:
        criteria = [OtherAfterPickling()]
        model.generate(prompt, streamer=remote, max_new_tokens=4, do_sample=False, stopping_criteria=criteria)
    assert "other parts after pickling" in caplog.text
    assert remote.pieces.pop() is local.pieces.pop() is None
    assert len(remote.pieces) == len(local.pieces)
    assert all(map(torch.equal, remote.pieces, local.pieces))


def test_unshareable_call_runs_alone_beside_the_batch(groups):
    whole, prompt = gpt2(), torch.tensor([[5, 6, 7], [8, 9, 10]])
    beams = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    with parallelize(gpt2(), workers=groups(2), batching=True) as model, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(model.generate, prompt[:1], max_new_tokens=40, do_sample=False) for _ in range(2)]
        assert torch.equal(model.generate(prompt, **beams), whole.generate(prompt, **beams))
        assert torch.equal(model(prompt).logits.argmax(-1), whole(prompt).logits.argmax(-1))
        want = whole.generate(prompt[:1], max_new_tokens=40, do_sample=False)
        assert all(torch.equal(future.result(), want) for future in running)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"do_sample": True}, "without a seed"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"use_cache": False}, "no cache"),
        ({"past_key_values": None}, "past_key_values"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "mask"),
        ({"pad_token_id": 3}, "ends with padding"),
        ({"input_ids": torch.tensor([[1], [2]])}, "one prompt"),
        ({"input_ids": torch.tensor([[1, 1 << 20]])}, "out of range"),
    ],
)
def test_reason_to_run_alone_is_named(arguments, why):
    reason = shared_call(gpt2(), {"input_ids": torch.tensor([[1, 2, 3]]), **arguments}, None)
    assert isinstance(reason, str)
    assert why in reason


def test_a_call_that_is_refused_ends_alone(groups):
    prompt = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="temperature") as whole:
        gpt2().generate(prompt, do_sample=True, temperature=-1.0)
    with parallelize(gpt2(), workers=groups(2), batching=True) as model, ThreadPoolExecutor(2) as pool:
        running = pool.submit(model.generate, prompt, max_new_tokens=40, do_sample=False)
        with pytest.raises(ValueError, match="temperature") as caught:
            model.generate(prompt, do_sample=True, temperature=-1.0, seed=1)
        assert str(caught.value) == str(whole.value)
        assert running.result().shape == (1, 43)


def test_sampled_call_draws_a_seed_among_others(groups):
    whole, prompt, options = gpt2(), torch.tensor([[5, 6, 7]]), {"max_new_tokens": 30, "do_sample": True}
    with parallelize(gpt2(), workers=groups(2), batching=True) as model, ThreadPoolExecutor(5) as pool:
        most = rows_of_each_round(model)
        torch.manual_seed(3)
        alone = model.generate(prompt, **options)
        assert most == [0], "a call alone draws as in one process, from the caller's generator"
        for _ in range(20):  # on a busy machine one call may end before the next comes
            running = pool.submit(model.generate, prompt, max_new_tokens=55, do_sample=False)
            outputs = [future.result() for future in [pool.submit(model.generate, prompt, **options) for _ in range(4)]]
            running.result()
            if max(most) > 1:
                break
    torch.manual_seed(3)
    assert torch.equal(alone, whole.generate(prompt, **options))
    assert max(most) > 1
    assert len({tuple(each[0].tolist()) for each in outputs}) == 4, "two calls drew the same numbers"


class Counting(LogitsProcessor):
    """A processor that bans the token chosen last, and counts its calls. It raises at call number `fails_at`."""

    def __init__(self, fails_at: int = 1000) -> None:
        self.calls = 0
        self.fails_at = fails_at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("no more")
        return scores.index_fill(1, input_ids[0, -1:], -torch.inf)


def test_processors_of_the_caller_count_their_own_rows(groups):
    whole, prompt, processors, futures = gpt2(), torch.tensor([[5, 6, 7]]), [], []
    options = {"max_new_tokens": 12, "do_sample": False}
    with parallelize(gpt2(), workers=groups(2), batching=True) as model, ThreadPoolExecutor(4) as pool:
        most = rows_of_each_round(model)
        for _ in range(4):
            processors.append(Counting())
            futures.append(pool.submit(model.generate, prompt, logits_processor=[processors[-1]], **options))
        got = [future.result() for future in futures]
    assert max(most) > 1
    want = whole.generate(prompt, logits_processor=[Counting()], **options)
    assert all(torch.equal(each, want) for each in got)
    assert [processor.calls for processor in processors] == [12] * 4


def test_processor_error_ends_its_call_alone(groups):
    prompt, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 40, "do_sample": False}
    with parallelize(gpt2(), workers=groups(2), batching=True) as model, ThreadPoolExecutor(4) as pool:
        want = model.generate(prompt, **options)
        running = [pool.submit(model.generate, prompt, **options) for _ in range(2)]
        for fails_at in (1, 2, 7, 8):  # on either rank
            with pytest.raises(RuntimeError, match="no more") as caught:
                model.generate(prompt, logits_processor=[Counting(fails_at)], **options)
            assert isinstance(caught.value, WorkerError)
        assert all(torch.equal(future.result(), want) for future in running)


def test_failing_forward_ends_its_call_alone(groups):
    """This GPT-2 has 64 positions, so a longer request fails in the middle of a forward pass of all rows."""
    prompt, too_long = torch.tensor([[5, 6, 7]]), torch.arange(5, 50)[None]
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False}
    with parallelize(gpt2(), workers=groups(2), batching=True) as model, ThreadPoolExecutor(4) as pool:
        most = rows_of_each_round(model)
        want = gpt2().generate(prompt, **options)
        futures = [pool.submit(model.generate, ids, **options) for ids in (prompt, prompt, too_long, prompt)]
        assert isinstance(futures.pop(2).exception(), IndexError)
        assert all(torch.equal(future.result(), want) for future in futures)
    assert max(most) > 2


def test_argument_that_cannot_cross_keeps_call_local(groups):
    prompt, lock = torch.tensor([[5, 6, 7]]), threading.Lock()
    options = {"max_new_tokens": 8, "do_sample": False}

    def any_token(_: int, ids: torch.Tensor) -> list[int]:
        with lock:
            return list(range(50))

    with parallelize(gpt2(), workers=groups(2), batching=True) as model:
        got = model.generate(prompt, prefix_allowed_tokens_fn=any_token, **options)
    assert torch.equal(got, gpt2().generate(prompt, prefix_allowed_tokens_fn=any_token, **options))


def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(33 + n): n for n in range(94)}, "!"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.mark.parametrize("where", ["argument", "settings"])
def test_stop_strings_end_a_row(groups, where):
    whole, prompt, tokenizer = gpt2(), torch.tensor([[5, 6, 7]]), letters()
    free = whole.generate(prompt, max_new_tokens=20, do_sample=False)[0, 3:].tolist()
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "stop_strings": [tokenizer.decode(free[9:11])]}
    if where == "settings":
        options = {"generation_config": GenerationConfig(**options)}
    want = whole.generate(prompt, tokenizer=tokenizer, **options)
    assert want.shape[1] < 23
    with parallelize(gpt2(), workers=groups(2), batching=True) as model, ThreadPoolExecutor(3) as pool:
        most = rows_of_each_round(model)
        futures = [pool.submit(model.generate, prompt, tokenizer=tokenizer, **options) for _ in range(3)]
        assert all(torch.equal(future.result(), want) for future in futures)
    assert max(most) > 1


def test_max_time_ends_a_call_early(groups):
    prompt = torch.tensor([[5, 6, 7]])
    with parallelize(gpt2(), workers=groups(2), batching=True) as model:
        most = rows_of_each_round(model)
        want = model.generate(prompt, max_new_tokens=55, do_sample=False)
        got = model.generate(prompt, max_new_tokens=55, do_sample=False, max_time=1e-6)
    assert 3 < got.shape[1] < want.shape[1]
    assert torch.equal(got, want[:, : got.shape[1]])
    assert len(most) > 2


def test_a_task_that_is_cancelled_frees_its_row(groups):
    prompt = torch.tensor([[5, 6, 7]])

    async def ask(model: Any) -> torch.Tensor:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        class Begun(BaseStreamer):
            def put(self, value: torch.Tensor) -> None:
                loop.call_soon_threadsafe(begun.set)

            def end(self) -> None:
                pass

        first = asyncio.create_task(model.agenerate(prompt, max_new_tokens=10**4, do_sample=False, streamer=Begun()))
        second = asyncio.create_task(model.agenerate(prompt, max_new_tokens=10**4, do_sample=False))  # waits
        await begun.wait()
        second.cancel()
        first.cancel()
        for task in (first, second):
            with pytest.raises(asyncio.CancelledError):
                await task
        return await model.agenerate(prompt, max_new_tokens=9, do_sample=False)

    whole, endless = decoder("Llama"), decoder("Llama")
    endless.generation_config.eos_token_id = None  # else a call may end before it is cancelled
    with parallelize(endless, workers=groups(2), batching={"rows": 1}) as model:
        assert torch.equal(asyncio.run(ask(model)), whole.generate(prompt, max_new_tokens=9, do_sample=False))


@pytest.mark.parametrize("batching", [True, False])
def test_awaited_calls_are_those_of_generate(groups, batching):
    prompt, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 9, "do_sample": False}

    async def ask(model: Any) -> list[torch.Tensor]:
        return await asyncio.gather(*(model.agenerate(prompt, **options) for _ in range(3)))

    with parallelize(gpt2(), workers=groups(2), batching=batching) as model:
        outputs = asyncio.run(ask(model))
        with pytest.raises(ValueError, match="temperature"):
            asyncio.run(model.agenerate(prompt, do_sample=True, temperature=-1.0, seed=1))
        assert torch.equal(
            asyncio.run(model.agenerate(prompt, num_beams=2, **options)),
            gpt2().generate(prompt, num_beams=2, **options),
        )
    assert all(torch.equal(each, gpt2().generate(prompt, **options)) for each in outputs)


def test_sharing_starts_once_two_calls_meet(groups):
    prompt, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 50, "do_sample": False}
    with parallelize(gpt2(), workers=groups(2)) as model, ThreadPoolExecutor(2) as pool:
        most, (shared,) = rows_of_each_round(model), remote_of(model).calls.shared.values()
        trial = shared.trial
        want = model.generate(prompt, **options)
        model.generate(prompt, **options)
        assert trial._thread is None, "the proof ran for calls that came one after another"
        end = time.monotonic() + PROMPTLY
        while trial._why_alone:
            assert time.monotonic() < end
            assert all(
                torch.equal(each, want) for each in pool.map(lambda _: model.generate(prompt, **options), range(2))
            )
        assert most == [0]
        assert all(torch.equal(each, want) for each in pool.map(lambda _: model.generate(prompt, **options), range(4)))
    assert max(most) == 2


@pytest.mark.parametrize(
    ("batching", "call", "why"),
    [
        ({"prompt_tokens": 2}, {}, "has a prompt of 3 tokens, and 2 are allowed"),
        ({"new_tokens": 4}, {"max_new_tokens": 5}, "asks for 5 tokens, and 4 are allowed"),
        ({"new_tokens": 4}, {"max_length": 9, "num_beams": 2}, "asks for 6 tokens"),
        ({"new_tokens": 19}, {}, "asks for 20 tokens"),
        ({"cache_tokens": 20}, {"max_new_tokens": 18}, "may need 21 tokens, and 20 are allowed"),
    ],
)
def test_calls_above_a_limit_are_refused_at_once(groups, batching, call, why):
    with parallelize(gpt2(), workers=groups(2), batching=batching) as model, pytest.raises(BatchingError, match=why):
        model.generate(torch.tensor([[5, 6, 7]]), **call)


def test_calls_wait_for_room_in_the_caches(groups):
    prompt, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 17, "do_sample": False}
    with parallelize(gpt2(), workers=groups(2), batching={"cache_tokens": 50}) as model, ThreadPoolExecutor(6) as pool:
        most, want = rows_of_each_round(model), gpt2().generate(prompt, **options)
        assert all(torch.equal(each, want) for each in pool.map(lambda _: model.generate(prompt, **options), range(6)))
    assert max(most) == 2


def test_urgent_calls_get_rows_first(groups):
    """Four calls wait for one row. They get it in the order of their priority, and each gets its own tokens."""
    numbers, options = (0, 4, -2, 1), {"max_new_tokens": 5, "do_sample": False}
    with parallelize(gpt2(), workers=groups(2), batching={"rows": 1}) as model, ThreadPoolExecutor(4) as pool:
        (shared,), order = remote_of(model).calls.shared.values(), list[int]()
        batch, next_round = shared.batch, shared.batch.scheduler.next_round

        def decided(waiting: Any, running: Any, in_chunks: bool) -> Schedule:
            end = time.monotonic() + PROMPTLY
            while not order and len(waiting) < len(numbers) and time.monotonic() < end:
                time.sleep(0.001)
                while batch._arrived:
                    waiting[next(batch._numbers)] = batch._arrived.popleft()
            schedule = next_round(waiting, running, in_chunks)
            order.extend(waiting[number].priority for number in schedule.admitted)
            return schedule

        batch.scheduler.next_round = decided
        prompts = [torch.tensor([[5, 6, 7 + number]]) for number in range(4)]
        calls = [
            pool.submit(model.generate, ids, priority=number, **options)
            for ids, number in zip(prompts, numbers, strict=True)
        ]
        got = [call.result() for call in calls]
        with pytest.raises(ParallelError, match=r"priority is 'high'; it takes a whole number, and lower numbers go"):
            model.generate(prompts[0], priority="high", **options)
    assert order == sorted(numbers)
    assert all(torch.equal(ids, gpt2().generate(prompt, **options)) for ids, prompt in zip(got, prompts, strict=True))


def forward_lengths(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of tokens of each later forward."""
    lengths, forward = list[int](), model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", counting)
    return lengths


@torch.inference_mode()
def test_common_prefix_runs_once(monkeypatch):
    model, prefixes, numbers = gpt2(), PrefixCache(150), torch.Generator().manual_seed(0)
    base = torch.randint(5, 95, (1, 40), generator=numbers)
    requests = [base, torch.cat((base[:, :30], base[:, :9]), -1), base[:, :12], base]
    want = [model.generate(ids, max_new_tokens=6, do_sample=False) for ids in requests]
    lengths = forward_lengths(model, monkeypatch)
    for number, (ids, whole) in enumerate(zip(requests, want, strict=True)):
        prompts, rows = Prompts(model, prefixes), Rows(model, None, prefixes)
        row = BatchRow(number, prepare(model, {"input_ids": ids, "max_new_tokens": 6, "do_sample": False}))
        prompts.add(row)
        rows.join(prompts.run(64))
        while len(rows):
            rows.run(1)
        assert torch.equal(row.ids, whole)
    assert lengths == [40, *[1] * 5, 9, *[1] * 5, 12, *[1] * 5, 1, *[1] * 5]
    # A conversation continues its answer: the last token has not run yet.
    assert prefixes.length(torch.cat((want[1], base), -1)) == want[1].shape[1] - 1
    for first in (1, 2):  # two later prompts remove the first from the cache
        prefixes.keep(torch.full((1, 80), first), DynamicCache([(torch.zeros(1, 2, 80, 4),) * 2] * 2), 0)
    assert not prefixes.length(base)


@pytest.mark.parametrize(("worth", "forwards"), [(128, [(3, 12)]), (8, [(2, 2), (1, 12)])])
@torch.inference_mode()
def test_kept_prefix_serves_prompts_together(worth, forwards, monkeypatch):
    """Two prompts continue 30 kept tokens and one continues 20. All run from token 20 on, unless more than `worth` kept
    tokens would run again."""
    monkeypatch.setattr(scheduler, "_WORTH_A_PASS", worth)
    for model in (gpt2(), decoder("Llama")):
        prefixes, numbers = PrefixCache(200), torch.Generator().manual_seed(0)
        base, other = (torch.randint(5, 95, (1, 40), generator=numbers) for _ in range(2))
        requests = [
            torch.cat((base[:, :30], other[:, :1]), -1),
            torch.cat((base[:, :30], other[:, :2]), -1),
            torch.cat((base[:, :20], other[:, :12]), -1),
        ]
        want = [model.generate(ids, max_new_tokens=6, do_sample=False) for ids in requests]
        earlier, prompts = Prompts(model, prefixes), Prompts(model, prefixes)
        earlier.add(BatchRow(9, prepare(model, {"input_ids": base, "max_new_tokens": 2, "do_sample": False})))
        Rows(model, None, prefixes).join(earlier.run(64))
        for number, ids in enumerate(requests):
            prompts.add(BatchRow(number, prepare(model, {"input_ids": ids, "max_new_tokens": 6, "do_sample": False})))
        rows, seen = Rows(model, None, prefixes), list[tuple[int, int]]()
        everyone = [*prompts]
        while len(prompts):
            [prefill] = prompts.run(64)
            seen.append((len(prefill.rows), prompts.latest // len(prefill.rows)))
            rows.join([prefill])
        while len(rows):
            rows.run(1)
        assert all(torch.equal(row.ids, each) for row, each in zip(everyone, want, strict=True))
        assert seen == forwards


@pytest.mark.parametrize(("widest", "rounds"), [(0, [[0], [0, 1], [0, 1]]), (40, [[0], [0], [0, 1]])])
@torch.inference_mode()
def test_long_prompt_joins_one_round_later(widest, rounds):
    """A row decodes while a prompt of 40 tokens runs and joins. Both calls of `generate` get their own tokens."""
    model, numbers = decoder("Llama"), torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 95, (1, length), generator=numbers) for length in (9, 40)]
    want = [model.generate(ids, max_new_tokens=8, do_sample=False) for ids in prompts]
    calls = [({"input_ids": ids, "max_new_tokens": 8, "do_sample": False}, ObjectState(())) for ids in prompts]
    batch, tokens, seen = RankBatch(model, None, lambda: "no"), dict[int, list[int]](), list[list[int]]()
    schedule = Schedule(max_tokens=64, late_tokens=widest)
    for number in range(12):
        joins = {number: (b"", 0, None)} if number < 2 else {}
        order = Round(0, joins, [], schedule, prefixes=100)
        output = batch.run(order, dict(enumerate(calls)))
        seen.append(sorted(row for row in output.tokens if row not in tokens or len(tokens[row]) < 8))
        for row, some in output.tokens.items():
            tokens.setdefault(row, []).extend(some)
    assert seen[:3] == rounds
    assert [tokens[0], tokens[1]] == [ids[0, -8:].tolist() for ids in want]
    late = RankBatch(model, None, lambda: "no")  # a call that is given up after its last prompt token leaves
    for number, leaves in ((0, []), (1, []), (2, [1])):
        joins = {number: (b"", 0, None)} if number < 2 else {}
        output = late.run(Round(0, joins, leaves, Schedule(max_tokens=64, late_tokens=40), 100), dict(enumerate(calls)))
    assert [*output.tokens] == [0]


def waiting(*lengths: int) -> tuple[Prompts, Rows, list[torch.Tensor]]:
    """Return prompts of a model with kernels, no rows yet, and the tokens that each prompt gets alone."""
    model, prefixes, numbers = decoder("Llama"), PrefixCache(0), torch.Generator().manual_seed(0)
    calls = [
        {"input_ids": torch.randint(5, 95, (1, length), generator=numbers), "max_new_tokens": 9, "do_sample": False}
        for length in lengths
    ]
    want = [model.generate(**call) for call in calls]
    install(model)
    prompts = Prompts(model, prefixes)
    for number, call in enumerate(calls):
        prompts.add(BatchRow(number, prepare(model, call)))
    return prompts, Rows(model, None, prefixes), want


@pytest.mark.skipif(_decode is None, reason="the C kernel is not built")
@torch.inference_mode()
def test_prompts_run_beside_decoding_rows():
    """The end of one prompt and the beginning of the next share a pass with earlier rows; the last pieces are equal."""
    prompts, rows, want = waiting(9, 20, 30)
    everyone, pieces = [*prompts], list[tuple[int, bool]]()
    while len(prompts):
        prefill = prompts.run(16, (lambda: rows.run(1)) if len(rows) else None)
        pieces.append((prompts.latest, prompts.ran_beside))
        if prefill:
            rows.join(prefill)
    while len(rows):
        rows.run(1)
    assert pieces == [(9, False), (16, True), (16, True), (9, True), (9, True)]
    assert all(torch.equal(row.ids, each) for row, each in zip(everyone, want, strict=True))


@torch.inference_mode()
def test_rows_that_joined_hold_no_second_cache():
    model, prefixes = decoder("Llama"), PrefixCache(0)
    prompts, rows, caches = Prompts(model, prefixes), Rows(model, None, prefixes), list[Any]()
    for number in range(2):
        call = {"input_ids": torch.arange(5, 12)[None], "max_new_tokens": 9, "do_sample": False}
        prompts.add(BatchRow(number, prepare(model, call)))
        caches += [weakref.ref(row.cache) for row in prompts]
        rows.join(prompts.run(16))
    gc.collect()
    assert [cache() is None for cache in caches] == [False, True], "the rows share the first cache"


@pytest.mark.skipif(_decode is None, reason="the C kernel is not built")
@pytest.mark.parametrize(
    ("limited", "max_steps", "passes"),
    [
        (prompts_of_a_batch, 16, [[16, 1, 1, 2]]),
        (prompts_of_a_batch, 2, [[10, 1, 1], [6, 2]]),
        (decoder_stack, 1, [[16, 1, 1, 2]]),  # C computes the first step, and the modules compute the others
    ],
)
@torch.inference_mode()
def test_prompts_run_together_without_padding(limited, max_steps, passes, monkeypatch):
    """Four prompts fill a pass of 16 tokens, because only the last two, of one length, share a step."""
    monkeypatch.setattr(scheduler, "_WORTH_A_STEP", 4)
    monkeypatch.setattr(limited, "MAX_STEPS", max_steps)
    prompts, rows, want = waiting(2, 8, 3, 3)
    everyone, together = [*prompts], list[list[int]]()
    while len(prompts):
        results = prompts.run(16)
        together.append([prompts.latest, *(len(prefill.rows) for prefill in results)])
        rows.join(results)
    while len(rows):
        rows.run(1)
    assert together == passes
    assert all(torch.equal(row.ids, each) for row, each in zip(everyone, want, strict=True))


def test_prompts_that_begin_alike_share_on_the_ranks(groups):
    numbers = torch.Generator().manual_seed(0)
    base = torch.randint(5, 95, (1, 24), generator=numbers)
    requests = [torch.cat((base, torch.randint(5, 95, (1, 1 + n), generator=numbers)), -1) for n in range(6)]
    whole, options = decoder("Llama"), {"max_new_tokens": 8, "do_sample": False}
    with parallelize(decoder("Llama"), workers=groups(2), batching={"rows": 3}) as model, ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda ids: model.generate(ids, **options), requests))
        got += [model.generate(torch.cat((got[0], base[:, :3]), -1), **options)]
    want = [whole.generate(ids, **options) for ids in (*requests, torch.cat((got[0], base[:, :3]), -1))]
    assert all(map(torch.equal, got, want))


def test_a_deadline_ends_one_row(groups):
    prompt = torch.tensor([[5, 6, 7]])
    with parallelize(gpt2(), workers=groups(2), batching=True) as model, ThreadPoolExecutor(2) as pool:
        want = model.generate(prompt, max_new_tokens=55, do_sample=False)
        running = pool.submit(model.generate, prompt, max_new_tokens=55, do_sample=False)
        with pytest.raises(RequestTimeoutError):
            model.generate(prompt, max_new_tokens=55, do_sample=False, timeout=1e-3)
        assert torch.equal(running.result(), want)


@pytest.mark.parametrize(
    ("runs", "tokens", "says"),
    [
        (False, [], "'generate' did not get its turn in the batch before its deadline"),
        (True, [], "'generate' ran past its deadline in its prompt of 3 tokens"),
        (True, [8, 9], "'generate' ran past its deadline with 2 new tokens"),
        (False, [8, 9], "'generate' ran past its deadline with 2 new tokens, waiting to begin again"),
    ],
)
def test_a_late_call_says_its_phase(runs, tokens, says):
    prompt = torch.tensor([[5, 6, 7]])
    call = cast(Any, SimpleNamespace(prompt=prompt, objects=ObjectState(()), follow=lambda ids, new: (ids, False)))
    ticket = Ticket(call, (b"", 0), 0, lambda: None)
    ticket.runs, ticket.tokens, ticket.round_began = runs, tokens, time.monotonic()
    with pytest.raises(RequestTimeoutError) as caught:
        ticket.wait(time.monotonic())
    assert str(caught.value) == says


def test_more_than_may_wait_are_refused(groups):
    prompt = torch.tensor([[5, 6, 7]])
    with parallelize(gpt2(), workers=groups(2), batching={"rows": 1, "waiting": 1}) as model:
        with ThreadPoolExecutor(8) as pool:
            requests = [pool.submit(model.generate, prompt, max_new_tokens=50, do_sample=False) for _ in range(8)]
            errors = [future.exception() for future in requests]
        assert None in errors
        assert {type(error) for error in errors} == {type(None), BatchingError}


def test_worker_death_ends_rows_queue_continues():
    prompt, told = torch.tensor([[5, 6, 7]]), threading.Event()

    class Told(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            told.set()

        def end(self) -> None:
            pass

    want = gpt2().generate(prompt, max_new_tokens=50, do_sample=False)
    with parallelize(gpt2(), 2, workers={"device": "cpu"}, batching=True) as model, ThreadPoolExecutor(2) as pool:
        for _ in range(20):  # repeat until a worker dies while rows run
            told.clear()
            running = pool.submit(model.generate, prompt, max_new_tokens=50, do_sample=False, streamer=Told())
            assert told.wait(60)
            kill(deployment_of(model).pids[1])
            error = running.exception()
            assert torch.equal(model.generate(prompt, max_new_tokens=50, do_sample=False), want)
            if error is not None:
                break
        assert isinstance(error, WorkerDiedError)
        assert error.rank == 1


def test_deparallelize_ends_running_calls():
    prompt = torch.tensor([[5, 6, 7]])
    model = parallelize(gpt2(), 2, workers={"device": "cpu"}, batching=True)
    with ThreadPoolExecutor(4) as pool:
        requests = [pool.submit(model.generate, prompt, max_new_tokens=55, do_sample=False) for _ in range(4)]
        model.deparallelize()
        want = model.generate(prompt, max_new_tokens=55, do_sample=False)
        for future in requests:
            assert isinstance(future.exception(), ParallelError) or torch.equal(future.result(), want)


def test_unreferenced_model_ends_its_workers():
    model = parallelize(gpt2(), 2, workers={"device": "cpu"}, batching=True)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
    pids = deployment_of(model).pids
    del model
    await_end(*pids)


def test_bad_options_are_named(groups):
    with pytest.raises(ParallelError, match="rows is 0"):
        parallelize(gpt2(), workers=groups(2), batching={"rows": 0})
    with pytest.raises(ParallelError, match=r"batching has no option 'row'.*did you mean"):
        parallelize(gpt2(), workers=groups(2), batching={"row": 3})
    with pytest.raises(ParallelError, match=r"batching has no option 'prefill_chunk'; set prefill_patience"):
        parallelize(gpt2(), workers=groups(2), batching={"prefill_chunk": 64})
    with pytest.raises(ParallelError, match="decode is 'compile'"):
        parallelize(gpt2(), workers=groups(2), batching=True, decode="compile")


def test_ranks_measure_their_prompts(groups: Any) -> None:
    with parallelize(gpt2(), workers=groups(2), batching={"prefill_patience": 50}) as model:
        (shared,) = remote_of(model).calls.shared.values()
        batch = shared.batch
        ids = torch.arange(3, 33)[None]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: model.generate(ids, max_new_tokens=9, do_sample=False), range(3)))
        assert batch.scheduler.budget._speed > 0, "no rank measured its prompts"


def test_call_during_the_end_is_lost() -> None:
    """No call is dropped between the look at the calls that have arrived and their removal."""
    batch = Batch(
        BatchingOptions(), cast(Any, None), cast(Any, SimpleNamespace(submit=lambda request: None, device="cpu")), str
    )
    tickets: list[Any] = [SimpleNamespace(lost=False, ring=lambda: None) for _ in range(2)]
    batch._arrived.append(tickets[0])

    def batches() -> Iterator[int]:
        batch._arrived.append(tickets[1])  # as if another thread ran now
        yield 1

    batch._batches = cast(Any, batches())
    batch.end(GroupError("ended"), None)
    assert all(ticket.lost for ticket in tickets)
    assert not batch.busy


def test_interrupted_gathering_stops() -> None:
    """A caller may be interrupted while it waits for other calls; later calls then queue their rounds themselves."""
    requests: list[Any] = []
    batch = Batch(
        BatchingOptions(), cast(Any, None), cast(Any, SimpleNamespace(submit=requests.append, device="cpu")), str
    )

    class Interrupted(list[int]):
        def __len__(self) -> int:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batch.add(cast(Any, SimpleNamespace()), Interrupted())
    assert not requests
    batch.add(cast(Any, SimpleNamespace()), ())
    assert len(requests) == 1
