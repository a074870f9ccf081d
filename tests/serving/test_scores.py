"""Compares scores of text pairs with transformers, and tests `/detokenize`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from parallelformers_ng import parallelize
from parallelformers_ng.serving.forwards import activation_of
from parallelformers_ng.serving.model_kinds import Kind
from tests.helpers.server import END, ScriptedModel, serving, tiny_tokenizer
from tests.zoo.build import build

QUERY = "What is red?"
DOCUMENTS = ["A rose is red.", "Nobody knows.", "The sky, which is over all of us, is blue."]
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def pairs_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    end = (END, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B:1 {END}:1", special_tokens=[end]
    )
    return tokenizer


TOKENIZER = pairs_tokenizer()


def encoder() -> Any:
    return build(BertForSequenceClassification, BertConfig(vocab_size=len(TOKENIZER), num_labels=1, **SMALL))


def decoder(pad: int | None) -> Any:
    config = Qwen3Config(
        vocab_size=len(TOKENIZER), num_labels=1, num_key_value_heads=2, head_dim=8, pad_token_id=pad, **SMALL
    )
    return build(Qwen3ForSequenceClassification, config)


MODELS = {
    "encoder": encoder,
    "decoder": lambda: decoder(TOKENIZER.pad_token_id),
    "decoder without padding": lambda: decoder(None),
}


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, groups: Callable[[int], Any]) -> Iterator[tuple[list[float], httpx.Client]]:
    """Yield the logits of the text pairs, each computed alone, and a client."""
    whole = MODELS[request.param]()
    with torch.no_grad():
        logits = [whole(**TOKENIZER(QUERY, text, return_tensors="pt")).logits[0, 0] for text in DOCUMENTS]
    kind = Kind(activation=activation_of(whole.config))
    with (
        parallelize(whole, workers=groups(2)) as cut,
        serving(cut, TOKENIZER, kind) as running,
        running.client() as http,
    ):
        yield torch.stack(logits), http


def close(got: list[float], want: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(got), want, rtol=1e-4, atol=1e-5)


def test_pairs_are_scored(served):
    logits, http = served
    for route, first, second in (("/v1/score", "text_1", "text_2"), ("/score", "queries", "items")):
        answer = http.post(route, json={first: QUERY, second: DOCUMENTS}).json()
        close([each["score"] for each in answer["data"]], logits.sigmoid())
        assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    each_own = http.post("/v1/score", json={"text_1": [QUERY] * 3, "text_2": DOCUMENTS, "use_activation": False}).json()
    close([each["score"] for each in each_own["data"]], logits)
    tokens = sum(len(TOKENIZER(QUERY, text)["input_ids"]) for text in DOCUMENTS)
    assert each_own["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize("route", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ranked(served, route):
    logits, http = served
    order = logits.argsort(descending=True).tolist()
    answer = http.post(route, json={"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    assert [each["index"] for each in answer] == order
    assert [each["document"]["text"] for each in answer] == [DOCUMENTS[index] for index in order]
    close([each["relevance_score"] for each in answer], logits.sigmoid()[order])
    body = {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 2, "return_documents": False}
    few = http.post(route, json=body).json()["results"]
    assert few == [{"index": each["index"], "relevance_score": each["relevance_score"]} for each in answer[:2]]


@pytest.mark.parametrize(
    ("route", "body", "why"),
    [
        ("/v1/score", {"text_1": "a"}, "0 of the fields text_2"),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "2 of the fields text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "2 first texts and 1 second texts"),
        ("/v1/score", {"text_1": [], "text_2": []}, "0 texts or pairs of texts"),
        ("/v1/score", {"text_1": "x" * 600, "text_2": "y"}, "tokens; the limit is"),
        ("/v1/rerank", {"query": "a", "documents": []}, "0 texts or pairs of texts"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 300}, "300 texts or pairs of texts; send 1 to 256"),
        ("/v1/rerank", {"query": "a", "documents": [5]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a"}, "no embeddings"),
        ("/v1/completions", {"prompt": "a"}, "generates no text"),
    ],
)
def test_requests_that_cannot_be_scored_are_refused(groups, route, body, why):
    with serving(parallelize(encoder(), workers=groups(1)), TOKENIZER, Kind(activation=torch.nn.Sigmoid())) as running:
        refused = running.client().post(route, json=body)
    assert refused.status_code == 400, refused.text
    assert why in refused.json()["error"]["message"]


def test_half_a_character_is_refused(served):
    body = b'{"text_1": "\\ud800", "text_2": "y"}'
    refused = served[1].post("/v1/score", content=body, headers={"content-type": "application/json"})
    assert refused.status_code == 400
    assert "the tokenizer cannot read the text" in refused.json()["error"]["message"]


def test_a_model_of_text_does_not_score():
    with serving(ScriptedModel(TOKENIZER), TOKENIZER) as running, running.client() as http:
        for route, body in (
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/v1/rerank", {"query": "a", "documents": "b"}),
        ):
            refused = http.post(route, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


def test_tokens_become_their_text():
    with serving(ScriptedModel(tiny_tokenizer()), tiny_tokenizer()) as running, running.client() as http:
        for text in ("Hello", "中文 🙂", f"<tool_call>{END}"):
            tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
            assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
        for tokens in ([100_000], [-1], ["x"], [], [1] * 1000):
            assert http.post("/detokenize", json={"tokens": tokens}).status_code == 400
