"""Tests supported fields of vLLM's requests on two ranks, alone and in a batch with requests without these fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from parallelformers_ng import parallelize
from tests.helpers.server import END, ScriptedModel, serving, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 80}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
OPEN = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}


def first_choice(http: httpx.Client, route: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def text(choice: dict[str, Any]) -> str:
    content: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return content


def is_json(answer: str) -> bool:
    return bool(json.loads(answer).keys() == {"a", "b"})


CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "choice": ({"structured_outputs": {"choice": ["positive", "negative"]}}, {"positive", "negative"}.__contains__),
    "choices of all kinds": (
        {"structured_outputs": {"choice": ['a "b"\n', "中文🙂", "\\d+", "a"]}},
        {'a "b"\n', "中文🙂", "\\d+", "a"}.__contains__,
    ),
    "regex": (
        {"structured_outputs": {"regex": "[a-c]{3,5}@(x|yy)\\.com"}},
        re.compile("[a-c]{3,5}@(x|yy)\\.com").fullmatch,
    ),
    "json": ({"structured_outputs": {"json": SCHEMA}}, is_json),
    "json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_json),
    "json without white space": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        re.compile('\\{"a":"[xy]","b":(true|false)\\}').fullmatch,
    ),
    "json with wide white space": (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[\\n]"}},
        re.compile('\\{\\n?"a"\\n?:\\n?"[xy]"\\n?,\\n?"b"\\n?:\\n?(true|false)\\n?\\}').fullmatch,
    ),
    "json of its own properties": (
        {"structured_outputs": {"json": OPEN, "disable_additional_properties": True}},
        '{"a": "x"}'.__eq__,
    ),
    "gbnf": (
        {"structured_outputs": {"grammar": 'root ::= "a" digit "b"\ndigit ::= [0-9]'}},
        re.compile("a\\db").fullmatch,
    ),
    "lark": (
        {"structured_outputs": {"grammar": 'start: "a" DIGIT "b"\nDIGIT: /[0-9]/'}},
        re.compile("a\\db").fullmatch,
    ),
    "guided_choice": ({"guided_choice": ["left", "right"]}, {"left", "right"}.__contains__),
    "guided_regex": ({"guided_regex": "[0-9]{4}-[0-9]{2}"}, re.compile("\\d{4}-\\d\\d").fullmatch),
    "guided_json": ({"guided_json": SCHEMA}, is_json),
    "guided_json and white space": (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": ""},
        re.compile('\\{"a":"[xy]","b":(true|false)\\}').fullmatch,
    ),
    "guided_grammar": ({"guided_grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}.__contains__),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_answers_are_kept_to_their_constraint(http, route, name):
    fields, meets = CONSTRAINTS[name]
    body = HELLO if route == CHAT else {"prompt": "Hello", "max_tokens": 80}
    for seed in range(2):
        choice = first_choice(http, route, {**body, **fields, "seed": seed, "temperature": 2})
        assert meets(text(choice)), text(choice)
        assert choice["finish_reason"] == "stop"


def test_constraints_leave_other_rows_unchanged(http, tiny_whole):
    """Every second row has a constraint; the rows without a constraint have the tokens of one process."""

    def ask(number: int) -> str:
        fields = list(CONSTRAINTS.values())[number // 2][0] if number % 2 else {"temperature": 0}
        return text(
            first_choice(http, COMPLETIONS, {"prompt": f"Number {number}", "max_tokens": 60, "seed": 3, **fields})
        )

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    assert answers == [ask(number) for number in range(16)]
    for number, answer in enumerate(answers):
        if number % 2:
            assert list(CONSTRAINTS.values())[number // 2][1](answer), answer
        else:
            ids = torch.tensor([TOKENIZER(f"Number {number}")["input_ids"]])
            tokens = tiny_whole.generate(ids, do_sample=False, max_new_tokens=60)[0, ids.shape[1] :]
            assert answer == TOKENIZER.decode(tokens, skip_special_tokens=True)


def greedy(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "Hello", "max_tokens": 40, "temperature": 0, "logprobs": 0, **fields}
    answer = http.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    return {**answer.json()["choices"][0], **answer.json()["usage"]}


@pytest.mark.parametrize("place", [3, 11])
def test_stop_token_ends_the_answer_and_is_included(http, tiny_whole, place):
    ids = torch.tensor([TOKENIZER("Hello")["input_ids"]])
    tokens = tiny_whole.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :].tolist()
    token = tokens[place]
    first = tokens.index(token)
    got = greedy(http, stop_token_ids=[token])
    assert (got["completion_tokens"], got["finish_reason"]) == (first + 1, "stop")
    assert got["text"] == TOKENIZER.decode(tokens[: first + 1], skip_special_tokens=True)
    later = greedy(http, stop_token_ids=[token], min_tokens=first + 1)
    settings = {"eos_token_id": [TOKENIZER.eos_token_id, token], "min_new_tokens": first + 1}
    want = tiny_whole.generate(ids, do_sample=False, max_new_tokens=40, **settings)[0, ids.shape[1] :].tolist()
    assert later["text"] == TOKENIZER.decode(want, skip_special_tokens=True)
    assert later["completion_tokens"] == len(want) > first + 1


def test_answer_continues_past_ignored_and_early_ends(groups):
    model = tiny_model(TOKENIZER)
    ids = torch.tensor([TOKENIZER("Hello")["input_ids"]])
    tokens = model.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :].tolist()
    end = tokens[2]
    first = tokens.index(end)
    model.generation_config.eos_token_id = end
    want = model.generate(ids, do_sample=False, max_new_tokens=40, min_new_tokens=9)[0, ids.shape[1] :].tolist()
    with (
        parallelize(model, workers=groups(2), batching=True) as cut,
        serving(cut, TOKENIZER) as running,
        running.client() as http,
    ):
        plain = greedy(http)
        assert (plain["completion_tokens"], plain["finish_reason"]) == (first + 1, "stop")
        longer = greedy(http, min_tokens=9)
        assert longer["completion_tokens"] == len(want) > 9
        ignored = greedy(http, ignore_eos=True)
        assert (ignored["completion_tokens"], ignored["finish_reason"]) == (40, "length")
        stopped = greedy(http, ignore_eos=True, stop_token_ids=[tokens[first + 3]])
        assert stopped["finish_reason"] == "stop"
        assert stopped["completion_tokens"] == tokens.index(tokens[first + 3]) + 1
        forced = greedy(http, min_tokens=9, structured_outputs={"choice": ["ab"]})
        assert (forced["text"], forced["finish_reason"]) == ("ab", "stop"), (
            "a constraint takes precedence over min_tokens"
        )


def test_stop_strings_act_after_min_tokens(http):
    whole_text = greedy(http)["text"]
    stop = whole_text[2:4]
    assert greedy(http, stop=stop)["text"] == whole_text[: whole_text.index(stop)]
    later = greedy(http, stop=stop, min_tokens=20)
    assert later["completion_tokens"] >= 20
    assert later["text"].startswith(whole_text[:4])


MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It is"}]
TEMPLATE = (
    "{{ '[' + mood + ']' if mood is defined }}{{ '[' + reasoning_effort + ']' if reasoning_effort is defined }}"
    "{{ '[thinks]' if enable_thinking }}{{ documents | map(attribute='text') | join(',') if documents }}"
)


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[ScriptedModel, httpx.Client]]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE + tokenizer.chat_template
    model = ScriptedModel(tokenizer, "It says so.")
    with serving(model, tokenizer) as running, running.client() as http:
        yield model, http


PROMPTS = [
    ({}, "<|start|>user\nHello<|end|>\n<|start|>assistant\nIt is<|end|>\n<|start|>assistant\n"),
    ({"add_generation_prompt": False}, "<|start|>user\nHello<|end|>\n<|start|>assistant\nIt is<|end|>\n"),
    ({"continue_final_message": True}, "<|start|>user\nHello<|end|>\n<|start|>assistant\nIt is"),
    (
        {"continue_final_message": True, "add_generation_prompt": False},
        "<|start|>user\nHello<|end|>\n<|start|>assistant\nIt is",
    ),
    (
        {"chat_template_kwargs": {"mood": "calm"}, "add_generation_prompt": False},
        "[calm]<|start|>user\nHello<|end|>\n<|start|>assistant\nIt is<|end|>\n",
    ),
    ({"reasoning_effort": "low", "continue_final_message": True}, "[low][thinks]<|start|>user\nHello"),
    ({"reasoning_effort": "none", "continue_final_message": True}, "[none]<|start|>user\nHello"),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True},
        "[low]<|start|>user\nHello",
    ),
    ({"documents": [{"title": "t", "text": "a fact"}], "continue_final_message": True}, "a fact<|start|>user\nHello"),
]


@pytest.mark.parametrize(("fields", "want"), PROMPTS)
def test_fields_of_the_template_reach_the_prompt(scripted, fields, want):
    model, http = scripted
    body = {"messages": MESSAGES, **fields}
    assert http.post(CHAT, json=body).status_code == 200
    ids = model.calls[-1]["input_ids"][0].tolist()
    assert TOKENIZER.decode(ids).startswith(want)
    assert http.post("/tokenize", json=body).json()["tokens"] == ids


@pytest.mark.parametrize("fields", [{}, {"parallel_tool_calls": True}, {"parallel_tool_calls": False}])
@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_can_be_disabled(fields, stream):
    calls = "".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in (1, 2))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    body = {**HELLO, "tools": tools, "stream": stream, "max_tokens": 400, **fields}
    with serving(ScriptedModel(TOKENIZER, calls), TOKENIZER) as running, running.client() as http:
        answer = http.post(CHAT, json=body)
        if stream:
            events = [json.loads(line[6:])["choices"][0] for line in answer.text.split("\n\n")[:-2]]
            told = [call for event in events for call in event["delta"].get("tool_calls", ())]
            finish = events[-1]["finish_reason"]
        else:
            told = answer.json()["choices"][0]["message"]["tool_calls"]
            finish = answer.json()["choices"][0]["finish_reason"]
    want = [1] if fields.get("parallel_tool_calls") is False else [1, 2]
    assert [json.loads(call["function"]["arguments"])["a"] for call in told] == want
    assert finish == "tool_calls"


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_are_added_as_asked(special):
    tokenizer = tiny_tokenizer()
    end = (END, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[end])
    model = ScriptedModel(tokenizer, "So.")
    with serving(model, tokenizer) as running, running.client() as http:
        for route, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "Hello"})):
            http.post(route, json={**body, "add_special_tokens": special})
            assert (model.calls[-1]["input_ids"][0, 0] == tokenizer.eos_token_id) == special
            http.post(route, json=body)
            assert (model.calls[-1]["input_ids"][0, 0] == tokenizer.eos_token_id) == (route == COMPLETIONS)
