"""Tests clients of servers with OpenAI's API: LangChain's chat and embeddings, lm-eval's local-completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import numpy
import pytest
import torch
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from parallelformers_ng.serving.model_kinds import Kind
from parallelformers_ng.serving.sentence_modules import Pooling
from tests.ecosystem.test_evaluation import KINDS, same, tasks  # noqa: F401  (a fixture)
from tests.helpers.server import Running, ScriptedModel, serving, tiny_tokenizer


@pytest.fixture(scope="module")
def running(language_model) -> Iterator[Running]:
    with serving(language_model.cut, language_model.tokenizer, model="smollm2") as server:
        yield server


def chat(running: Running, model: str, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=f"{running.url}/v1", api_key="none", max_retries=0, **settings)


def test_langchain_chats(language_model, running) -> None:
    client = chat(running, "smollm2", temperature=0, max_completion_tokens=12, logprobs=True)
    answer = client.invoke("What is the capital of France?")
    streamed = list(client.stream("What is the capital of France?"))
    awaited = asyncio.run(client.ainvoke("What is the capital of France?"))
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    ids = language_model.tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    tokens = language_model.whole.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
    want = language_model.tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer.content == awaited.content == "".join(chunk.content for chunk in streamed) == want
    assert len(answer.response_metadata["logprobs"]["content"]) == answer.usage_metadata["output_tokens"]


def test_langchain_gets_an_answer_of_a_schema(running) -> None:
    schema = {"title": "answer", "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}}
    schema |= {"required": ["city"], "additionalProperties": False}
    client = chat(running, "smollm2", temperature=0).with_structured_output(schema, method="json_schema")
    assert client.invoke("What is the capital of France?") in ({"city": "Paris"}, {"city": "Rome"})


def test_langchain_calls_tools() -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    tokenizer = tiny_tokenizer()
    says = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    with serving(ScriptedModel(tokenizer, says), tokenizer) as running:
        client = chat(running, "tiny").bind_tools([add])
        streamed = list(client.stream("1 + 2?"))
        for answer in (client.invoke("1 + 2?"), sum(streamed[1:], streamed[0])):
            assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 1, "b": 2})]


def test_langchain_embeds(encoder) -> None:
    texts = ["The capital of France is Paris.", "Two plus two is four."]
    with serving(encoder.cut, encoder.tokenizer, Kind(Pooling()), model="minilm") as running:
        client = OpenAIEmbeddings(
            model="minilm", base_url=f"{running.url}/v1", api_key="none", check_embedding_ctx_length=False
        )
        got = client.embed_documents(texts)
        assert client.embed_query(texts[0]) == pytest.approx(got[0], abs=1e-5)
    for text, vector in zip(texts, got, strict=True):
        inputs = encoder.tokenizer(text, return_tensors="pt")
        want = torch.nn.functional.normalize(encoder.whole(**inputs).last_hidden_state.mean(1), dim=-1)[0]
        numpy.testing.assert_allclose(vector, want.detach(), atol=1e-4)


def test_lm_eval_asks(language_model, running, tasks: Path, tmp_path: Path) -> None:  # noqa: F811
    language_model.tokenizer.save_pretrained(tmp_path)

    def results(harness: Any) -> dict[str, Any]:
        names = [f"facts_{kind}" for kind in KINDS]
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        evaluated = lm_eval.simple_evaluate(harness, tasks=names, task_manager=manager, bootstrap_iters=0)
        return evaluated["samples"]

    got = results(
        LocalCompletionsAPI(
            base_url=f"{running.url}/v1/completions",
            model="smollm2",
            tokenizer_backend="huggingface",
            tokenizer=str(tmp_path),
            batch_size=2,
        )
    )
    want = results(HFLM(pretrained=language_model.whole, tokenizer=language_model.tokenizer, batch_size=2))
    for kind in KINDS:
        for mine, theirs in zip(got[f"facts_{kind}"], want[f"facts_{kind}"], strict=True):
            same(mine["resps"], theirs["resps"])
