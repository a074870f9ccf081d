"""Tests all options of `generate`: results have the same types, shapes, values and tokens as in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from parallelformers_ng import parallelize
from parallelformers_ng.sharding.cache_names import CACHE
from tests.zoo.build import largest_difference
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder, gpt2
from tests.zoo.seq2seq import t5

FAMILIES = {"gpt2": gpt2, "t5": t5, "llama": lambda: decoder("Llama")}

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "no_repeat_ngram_size": 2},
    "beams-early": {"num_beams": 3, "early_stopping": True, "length_penalty": 0.5},
    "sample": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "sample-several": {"do_sample": True, "top_p": 0.9, "num_return_sequences": 3},
    "beam-sample": {"do_sample": True, "num_beams": 3},
    "penalties": {"repetition_penalty": 1.5, "min_new_tokens": 4, "bad_words_ids": [[7], [9, 11]]},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "attentions": {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True},
    "beam-scores": {"return_dict_in_generate": True, "output_scores": True, "num_beams": 3},
    "static-cache": {"cache_implementation": "static"},
    "no-cache": {"use_cache": False},
    "generation-config": {"generation_config": GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)},
    "max-time": {"max_time": 60.0},
}


@dataclass
class Pair:
    """A whole model and a parallelized copy of it."""

    whole: Any
    parallel: Any
    inputs: dict[str, Any]

    def both(self, **options: Any) -> tuple[Any, Any]:
        """Generate with both models from the same seed; the generators must end in the same state."""
        torch.manual_seed(11)
        want = self.whole.generate(**self.inputs, **options)
        after = torch.get_rng_state()
        torch.manual_seed(11)
        got = self.parallel.generate(**self.inputs, **options)
        assert torch.equal(torch.get_rng_state(), after), "the caller's generator must advance as in one process"
        return got, want


@pytest.fixture(scope="module", params=[(f, n) for f in FAMILIES for n in (2, 3)], ids=lambda p: f"{p[0]}-{p[1]}")
def pair(request, groups) -> Iterator[Pair]:
    family, world_size = request.param
    models = [FAMILIES[family]() for _ in range(2)]
    for model in models:
        model.set_attn_implementation("eager")  # the implementation that returns attention weights
    with parallelize(models[1], workers=groups(world_size)) as parallel:
        yield Pair(models[0], parallel, text_inputs())


def assert_same(got: Any, want: Any) -> None:
    """Assert the same structure, equal tokens, and numbers within 1e-4 of the largest."""
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert got.device == want.device
        if not want.is_floating_point():
            assert torch.equal(got, want)
        elif want.numel():
            assert torch.equal(got.isinf(), want.isinf())
            finite = want.isfinite()
            assert largest_difference(got[finite], want[finite]) <= 1e-4 if finite.any() else True
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for name in want:
            if name != CACHE:
                assert_same(got[name], want[name])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            assert_same(mine, theirs)
    else:
        assert got == want


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(pair: Pair, options: dict[str, Any]) -> None:
    limit = {} if "generation_config" in options else {"max_new_tokens": 6}
    got, want = pair.both(**limit, **options)
    if isinstance(want, dict) and CACHE in want:
        assert isinstance(got[CACHE], type(want[CACHE]))
        assert got[CACHE].get_seq_length() == want[CACHE].get_seq_length()
    assert_same(got, want)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": -1},
        {"num_beams": 2, "num_return_sequences": 3},
        {"no_such_option": 1},
        {"temperature": -1.0, "do_sample": True},
    ],
    ids=str,
)
def test_the_same_exception(pair: Pair, wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011 (whatever transformers raises)
        pair.whole.generate(**pair.inputs, **wrong)
    with pytest.raises(expected.type) as raised:
        pair.parallel.generate(**pair.inputs, **wrong)
    assert str(expected.value).split("\n")[0] in str(raised.value)


class Counting(LogitsProcessor):
    """A processor that bans the token with the step's number, counts, and records its inputs."""

    def __init__(self) -> None:
        self.steps = 0
        self.seen: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.seen.append(int(input_ids[0, -1]))
        scores = scores.clone()
        scores[:, self.steps] = float("-inf")
        return scores


class Locked(Counting):
    """A processor that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [Counting, Locked])
def test_processor_ends_with_its_local_state(pair: Pair, kind: type[Counting]) -> None:
    mine, theirs = kind(), kind()
    want = pair.whole.generate(**pair.inputs, max_new_tokens=5, logits_processor=LogitsProcessorList([theirs]))
    got = pair.parallel.generate(**pair.inputs, max_new_tokens=5, logits_processor=LogitsProcessorList([mine]))
    assert torch.equal(got, want)
    assert (mine.steps, mine.seen) == (theirs.steps, theirs.seen)


def test_a_lambda_with_a_closure_and_its_log(pair: Pair) -> None:
    log: list[int] = []
    counter = 0

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        nonlocal counter
        counter += 1
        log.append(len(ids))
        return list(range(5, 60))

    want = pair.whole.generate(**pair.inputs, max_new_tokens=5, prefix_allowed_tokens_fn=allowed)
    expected = (counter, list(log))
    counter = 0
    log.clear()
    got = pair.parallel.generate(**pair.inputs, max_new_tokens=5, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(got, want)
    assert (counter, log) == expected


def test_stopping_criteria(pair: Pair) -> None:
    class AfterThree(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.calls += 1
            return torch.full((input_ids.shape[0],), self.calls >= 3)

    got, want = AfterThree(), AfterThree()
    tokens = pair.whole.generate(**pair.inputs, max_new_tokens=9, stopping_criteria=[want])
    assert torch.equal(pair.parallel.generate(**pair.inputs, max_new_tokens=9, stopping_criteria=[got]), tokens)
    assert got.calls == want.calls == 3


class Keeping(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.tolist())

    def end(self) -> None:
        self.pieces.append("end")


def test_streamer_gets_the_same_pieces(pair: Pair) -> None:
    one = {name: value[:1] for name, value in pair.inputs.items()}
    got, want = Keeping(), Keeping()
    pair.whole.generate(**one, max_new_tokens=6, streamer=want)
    pair.parallel.generate(**one, max_new_tokens=6, streamer=got)
    assert got.pieces == want.pieces


def test_tokens_stream_before_the_next_is_chosen(pair: Pair) -> None:
    """The generation loop runs in this process. The streamer gets each token before the processor gets the next
    scores."""
    one = {name: value[:1] for name, value in pair.inputs.items()}
    seen: list[int] = []
    streamed_at: list[int] = []

    class Steps(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            streamed_at.append(len(seen))

        def end(self) -> None:
            pass

    class Note(LogitsProcessor):
        def __init__(self) -> None:
            self.lock = threading.Lock()  # keeps the loop in this process, where both ends share the lists

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(int(input_ids[0, -1]))
            return scores

    pair.parallel.generate(**one, max_new_tokens=4, streamer=Steps(), logits_processor=[Note()])
    assert streamed_at == [0, 1, 2, 3, 4]


def test_a_seed_of_its_own(pair: Pair) -> None:
    torch.manual_seed(5)
    want = pair.whole.generate(**pair.inputs, max_new_tokens=6, do_sample=True)
    before = torch.get_rng_state()
    got = pair.parallel.generate(**pair.inputs, max_new_tokens=6, do_sample=True, seed=5)
    assert torch.equal(got, want)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_assistant(pair: Pair) -> None:
    if pair.whole.config.is_encoder_decoder:
        pytest.skip("transformers wants an assistant with the same encoder")
    one = {name: value[:1] for name, value in pair.inputs.items()}
    want = pair.whole.generate(**one, max_new_tokens=8, assistant_model=pair.whole)
    got = pair.parallel.generate(**one, max_new_tokens=8, assistant_model=pair.whole)
    assert torch.equal(got, want)


def test_edits_after_the_call_are_honoured(pair: Pair) -> None:
    for model in (pair.whole, pair.parallel):
        model.generation_config.max_new_tokens = 3
    got, want = pair.both()
    assert torch.equal(got, want)
    for model in (pair.whole, pair.parallel):
        model.generation_config.max_new_tokens = None


def test_text_streamer_in_another_thread(pair: Pair) -> None:
    class Decoder:
        def decode(self, tokens: Any, **kwargs: Any) -> str:
            return " ".join(str(int(token)) for token in torch.as_tensor(tokens).flatten()) + "\n"

    streamer = TextIteratorStreamer(Decoder(), timeout=30)
    one = {name: value[:1] for name, value in pair.inputs.items()}
    thread = threading.Thread(target=pair.parallel.generate, kwargs={**one, "max_new_tokens": 5, "streamer": streamer})
    thread.start()
    pieces = [piece for piece in streamer if piece]
    thread.join()
    assert len(pieces) >= 5
