"""Compares penalties and token biases with OpenAI's formula in one process, alone and in a batch of 16 rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    T5Config,
    T5ForConditionalGeneration,
)

from parallelformers_ng import parallelize
from parallelformers_ng.batching.penalties import Penalties, penalized
from tests.helpers.server import serving, tiny_model, tiny_tokenizer
from tests.zoo.build import build

TOKENIZER = tiny_tokenizer()
COMPLETIONS = "/v1/completions"
FIELDS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -2},
    {"presence_penalty": -0.5, "frequency_penalty": 2.0},
    {"logit_bias": {str(token): -100 for token in range(64, 200)}},
    {"logit_bias": {"70": 100}},
    {"presence_penalty": 0.4, "repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "repetition_penalty": 0.8, "logit_bias": {"70": 3, "71": -2}},
]


class Counted(LogitsProcessor):
    """Logits processor with OpenAI's formula: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence."""

    def __init__(self, start: int, presence: float, frequency: float) -> None:
        self.start, self.presence, self.frequency = start, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        answer = input_ids[0, self.start :].tolist()
        for token in set(answer):
            scores[0, token] -= self.presence + self.frequency * answer.count(token)
        return scores


def reference(start: int, fields: dict[str, Any]) -> LogitsProcessorList:
    """Return logits processors for the fields of a request in vLLM's order, from transformers if possible."""
    processors = LogitsProcessorList()
    if bias := fields.get("logit_bias"):
        processors.append(SequenceBiasLogitsProcessor([[[int(token)], float(value)] for token, value in bias.items()]))
    if repetition := fields.get("repetition_penalty"):
        processors.append(RepetitionPenaltyLogitsProcessor(repetition))
    processors.append(Counted(start, fields.get("presence_penalty", 0), fields.get("frequency_penalty", 0)))
    return processors


def penalties(start: int, fields: dict[str, Any]) -> Penalties:
    bias = tuple((int(token), float(value)) for token, value in fields.get("logit_bias", {}).items())
    values = [fields.get(name, default) for name, default in (("presence_penalty", 0), ("frequency_penalty", 0))]
    return Penalties(start, *values, fields.get("repetition_penalty", 1), bias)


def test_batched_penalties_equal_single_rows():
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 90, (20 + 7 * row,), generator=generator) for row in range(len(FIELDS))]
    scores = torch.randn(len(FIELDS), 260, generator=generator) * 5
    before = scores.clone()
    starts = list(range(len(FIELDS)))
    got = penalized(scores, sequences, [penalties(start, each) for start, each in zip(starts, FIELDS, strict=True)])
    assert torch.equal(scores, before)
    for row, fields in enumerate(FIELDS):
        want = reference(starts[row], fields)(sequences[row][None], scores[row : row + 1])
        torch.testing.assert_close(got[row : row + 1], want, rtol=1e-6, atol=1e-6)
        assert not torch.equal(got[row], scores[row])
        assert torch.equal(
            penalties(starts[row], fields)(sequences[row][None], scores[row : row + 1]), got[row : row + 1]
        )


def test_an_answer_without_tokens_has_no_penalties():
    scores = torch.randn(1, 260)
    assert torch.equal(Penalties(3, 1.0, 1.0)(torch.tensor([[1, 2, 3]]), scores), scores)


def expected(tiny_whole: Any, prompt: str, fields: dict[str, Any]) -> str:
    ids = torch.tensor([TOKENIZER(prompt)["input_ids"]])
    processors = reference(ids.shape[1], fields)
    tokens = tiny_whole.generate(ids, do_sample=False, max_new_tokens=40, logits_processor=processors)[
        0, ids.shape[1] :
    ]
    text: str = TOKENIZER.decode(tokens, skip_special_tokens=True)
    return text


def test_penalized_and_plain_rows_equal_one_process(http, tiny_whole):
    def ask(number: int, **more: Any) -> Any:
        fields = FIELDS[number // 2] if number % 2 else {}
        body = {"prompt": f"Number {number}", "max_tokens": 40, "temperature": 0, **fields, **more}
        answer = http.post(COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    with ThreadPoolExecutor(16) as pool:
        together = [each["text"] for each in pool.map(ask, range(16))]
        sampled = list(pool.map(lambda number: ask(number, temperature=1.5, seed=3), range(16)))
    wanted = [
        expected(tiny_whole, f"Number {number}", FIELDS[number // 2] if number % 2 else {}) for number in range(16)
    ]
    assert together == wanted
    assert sampled == [ask(number, temperature=1.5, seed=3) for number in range(16)]
    plain = [expected(tiny_whole, f"Number {number}", {}) for number in range(16)]
    assert sum(mine != other for mine, other in zip(together, plain, strict=True)) >= 6, "the penalties have an effect"


def test_models_own_penalty_is_applied_too(groups):
    model = tiny_model(TOKENIZER)
    model.generation_config.repetition_penalty = 1.4
    fields = {"frequency_penalty": 1.0}
    ids = torch.tensor([TOKENIZER("Hello")["input_ids"]])
    processors = reference(ids.shape[1], {**fields, "repetition_penalty": 1.4})
    tokens = model.generate(
        ids, do_sample=False, max_new_tokens=40, logits_processor=processors, repetition_penalty=1.0
    )[0, ids.shape[1] :]
    with parallelize(model, workers=groups(2), batching=True) as cut, serving(cut, TOKENIZER) as running:
        body = {"prompt": "Hello", "max_tokens": 40, "temperature": 0, **fields}
        answer = running.client().post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    assert answer == TOKENIZER.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("batching", [True, False])
def test_decoder_answers_begin_with_their_first_token(groups, batching):
    """The answer of an encoder-decoder model begins after one start token, not after the prompt."""
    config = T5Config(
        vocab_size=len(TOKENIZER), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id, decoder_start_token_id=0,
    )  # fmt: skip
    model = build(T5ForConditionalGeneration, config)
    ids = torch.tensor([TOKENIZER("Hello")["input_ids"]])
    fields = {"frequency_penalty": 2.0, "presence_penalty": 1.0}
    tokens = model.generate(ids, do_sample=False, max_new_tokens=20, logits_processor=reference(1, fields))[0, 1:]
    body = {"prompt": "Hello", "max_tokens": 20, "temperature": 0}
    with parallelize(model, workers=groups(2), batching=batching) as cut, serving(cut, TOKENIZER) as running:
        http = running.client()
        answer = http.post(COMPLETIONS, json={**body, **fields}).json()["choices"][0]["text"]
        choice = http.post(COMPLETIONS, json={**body, "guided_choice": ["left", "right"]}).json()["choices"][0]["text"]
    assert answer == TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert choice in ("left", "right")
