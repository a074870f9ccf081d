"""Calls of many threads decoded together: each gets the tokens that it gets alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from parallelformers_ng import BatchingError, ParallelError, RequestTimeoutError, WorkerDiedError, parallelize
from parallelformers_ng.batching import proof
from parallelformers_ng.batching.sharing import shared_arguments
from parallelformers_ng.model.parallelized import deployment_of
from tests.patience import await_end, kill
from tests.zoo.decoders import bloom, decoder, gpt2
from tests.zoo.families import CASES

FAMILIES = {"llama": lambda: decoder("Llama", tied=True), "gpt2": gpt2, "bloom": bloom}
ALONE = {"roformer-causal", "bart-causal", "openai-gpt", "xlm-causal", "reformer"}
"""Their positions are counted from the longest row on, or they keep no cache."""


def calls(count: int) -> list[dict[str, Any]]:
    """Prompts and lengths of all kinds, some sampled with a seed, some with settings of their own."""
    numbers = torch.Generator().manual_seed(7)
    found = []
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
        found.append(call)
    return found


def alone(model: Any, call: dict[str, Any]) -> torch.Tensor:
    call = dict(call)
    if (seed := call.pop("seed", None)) is not None:
        torch.manual_seed(seed)
    return model.generate(**call)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_gets_the_tokens_of_a_solo_run(family, groups):
    whole, asked = FAMILIES[family](), calls(40)
    want = [alone(whole, call) for call in asked]
    with parallelize(FAMILIES[family](), workers=groups(2), batching={"rows": 6}) as model:
        most = rows_at_once(model)
        with ThreadPoolExecutor(16) as pool:
            got = list(pool.map(lambda call: model.generate(**call), asked))
    assert all(map(torch.equal, got, want))
    assert max(most) > 1, "no two calls were decoded together"
    assert max(most) <= 6


def rows_at_once(model: Any) -> list[int]:
    """How many rows run with each round from now on."""
    from parallelformers_ng.model.remote_module import remote_of

    queue, found = remote_of(model).dispatcher._queue, [0]
    next_round = queue._next_round

    def counting() -> Any:
        asked = next_round()
        found.append(len(queue._running))
        return asked

    queue._next_round = counting
    return found


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
    assert bool(proof.why_alone(model)) == (case.name in ALONE)


def test_a_streamer_gets_prompt_and_tokens_in_its_callers_thread(groups):
    class Pieces(BaseStreamer):
        def __init__(self) -> None:
            self.pieces: list[Any] = []
            self.threads: set[int] = set()

        def put(self, value: torch.Tensor) -> None:
            self.threads.add(threading.get_ident())
            self.pieces.append(value)

        def end(self) -> None:
            self.pieces.append(None)

    here, there, prompt = Pieces(), Pieces(), torch.tensor([[5, 6, 7]])
    gpt2().generate(prompt, streamer=here, max_new_tokens=7, do_sample=False)
    with parallelize(gpt2(), workers=groups(2), batching=True) as model:
        model.generate(prompt, streamer=there, max_new_tokens=7, do_sample=False)
    assert there.threads == {threading.get_ident()}
    assert there.pieces.pop() is here.pieces.pop() is None
    assert all(map(torch.equal, there.pieces, here.pieces))


def test_what_cannot_share_runs_alone_meanwhile(groups):
    whole, prompt = gpt2(), torch.tensor([[5, 6, 7], [8, 9, 10]])
    beams = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    with parallelize(gpt2(), workers=groups(2), batching=True) as model, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(model.generate, prompt[:1], max_new_tokens=40, do_sample=False) for _ in range(2)]
        assert torch.equal(model.generate(prompt, **beams), whole.generate(prompt, **beams))
        assert torch.equal(model(prompt).logits.argmax(-1), whole(prompt).logits.argmax(-1))
        want = whole.generate(prompt[:1], max_new_tokens=40, do_sample=False)
        assert all(torch.equal(future.result(), want) for future in running)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"do_sample": True}, "without a seed"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"use_cache": False}, "no cache"),
        ({"past_key_values": None}, "past_key_values"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "masked"),
        ({"input_ids": torch.tensor([[1], [2]])}, "one prompt"),
        ({"input_ids": torch.tensor([[1, 1 << 20]])}, "out of range"),
    ],
)
def test_why_a_call_runs_alone(given, why):
    assert why in shared_arguments(gpt2(), {"input_ids": torch.tensor([[1, 2, 3]]), **given}, None)


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


def test_a_deadline_ends_one_row(groups):
    prompt = torch.tensor([[5, 6, 7]])
    with parallelize(gpt2(), workers=groups(2), batching=True) as model, ThreadPoolExecutor(2) as pool:
        want = model.generate(prompt, max_new_tokens=55, do_sample=False)
        running = pool.submit(model.generate, prompt, max_new_tokens=55, do_sample=False)
        with pytest.raises(RequestTimeoutError):
            model.generate(prompt, max_new_tokens=55, do_sample=False, timeout=1e-3)
        assert torch.equal(running.result(), want)


def test_more_than_may_wait_are_refused(groups):
    prompt = torch.tensor([[5, 6, 7]])
    with parallelize(gpt2(), workers=groups(2), batching={"rows": 1, "waiting": 1}) as model:
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(model.generate, prompt, max_new_tokens=50, do_sample=False) for _ in range(8)]
            errors = [future.exception() for future in asked]
        assert None in errors
        assert {type(error) for error in errors} == {type(None), BatchingError}


def test_a_dead_worker_ends_what_runs_and_the_queue_goes_on():
    prompt, told = torch.tensor([[5, 6, 7]]), threading.Event()

    class Told(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            told.set()

        def end(self) -> None:
            pass

    want = gpt2().generate(prompt, max_new_tokens=50, do_sample=False)
    with parallelize(gpt2(), 2, workers={"device": "cpu"}, batching=True) as model, ThreadPoolExecutor(2) as pool:
        for _ in range(20):  # until a worker dies while rows run
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


def test_an_end_of_the_parallelization_ends_what_runs():
    prompt = torch.tensor([[5, 6, 7]])
    model = parallelize(gpt2(), 2, workers={"device": "cpu"}, batching=True)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(model.generate, prompt, max_new_tokens=55, do_sample=False) for _ in range(4)]
        model.deparallelize()
        want = model.generate(prompt, max_new_tokens=55, do_sample=False)
        for future in asked:
            assert isinstance(future.exception(), ParallelError) or torch.equal(future.result(), want)


def test_a_model_that_nobody_holds_goes_with_its_workers():
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
    with pytest.raises(ParallelError, match="decode is 'compile'"):
        parallelize(gpt2(), workers=groups(2), batching=True, decode="compile")
