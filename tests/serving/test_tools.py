"""Tests tools in chats: forced calls, calls without a marker, and chat templates without tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.serving.bare_calls import BareReader
from parallelformers_ng.serving.tools import BareForm, response_template
from tests.helpers.server import TEMPLATE, Running, ScriptedModel, serving, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"It does {name}.", "parameters": schema}}


COLOUR = {"$ref": "#/$defs/Colour"}
PAINT = tool("paint", colour=COLOUR, thick={"type": "boolean"})
PAINT["function"]["parameters"]["$defs"] = {"Colour": {"enum": ["red", "bl::=ue", "grün"]}}
TOOLS = [PAINT, tool("wait"), {"type": "function", "function": {"name": "stop"}}]
PAINTED = [{"colour": colour, "thick": thick} for colour in ("red", "bl::=ue", "grün") for thick in (True, False)]
FORCED = {
    "required": ("required", {"paint", "wait", "stop"}),
    "named": ({"type": "function", "function": {"name": "paint"}}, {"paint"}),
    "named without arguments": ({"type": "function", "function": {"name": "wait"}}, {"wait"}),
    "allowed": (
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [PAINT, {**TOOLS[1]}]}},
        {"paint", "wait"},
    ),
}


@pytest.fixture(scope="module")
def running(groups: Callable[[int], WorkerGroup]) -> Iterator[Running]:
    tokenizer = tiny_tokenizer()  # short prompts leave room for calls with one token per byte
    tokenizer.chat_template = TEMPLATE.replace("(tools | tojson)", "(tools | map(attribute='function.name') | join)")
    with (
        parallelize(tiny_model(tokenizer), workers=groups(2), batching=True) as model,
        serving(model, tokenizer) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def http(running: Running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


def check(calls: list[Any], names: set[str]) -> None:
    assert calls
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert call.function.name in names
        if call.function.name != "stop":
            assert arguments in (PAINTED if call.function.name == "paint" else [{}])


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FORCED)
def test_a_model_that_must_call_calls(running, name, stream, several):
    choice, names = FORCED[name]
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    arguments = {"model": "tiny", "messages": HELLO, "tools": TOOLS[:2], "tool_choice": choice, "temperature": 1.5}
    arguments |= {"parallel_tool_calls": several, "max_tokens": 400}
    for seed in range(3):
        if stream:
            with client.chat.completions.stream(**arguments, seed=seed) as chunks:
                answer = chunks.get_final_completion().choices[0]
        else:
            answer = client.chat.completions.create(**arguments, seed=seed).choices[0]
        if answer.finish_reason == "length":
            continue
        check(answer.message.tool_calls, names)
        assert (answer.finish_reason, answer.message.content or None) == ("tool_calls", None)
        if not several or "named" in name:
            assert len(answer.message.tool_calls) == 1
        break
    else:
        pytest.fail("no answer was complete")


def test_calls_are_forced_among_rows_that_are_not(http):
    """Each of 16 concurrent answers equals the answer to the same request alone."""

    def ask(number: int) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": f"Number {number}"}], "seed": 5, "max_tokens": 120}
        if number % 2:
            body |= {"tools": TOOLS[:2], "tool_choice": list(FORCED.values())[number // 2 % 4][0]}
            body |= {"parallel_tool_calls": False}
        answer = http.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        for call in message.get("tool_calls", ()):
            del call["id"]
        return message

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert together == [ask(number) for number in range(16)]
    assert all(bool(message.get("tool_calls")) == bool(number % 2) for number, message in enumerate(together))


def test_forced_call_ignores_a_response_format(http):
    body = {"messages": HELLO, "tools": TOOLS[1:2], "tool_choice": "required", "parallel_tool_calls": False}
    answer = http.post(CHAT, json={**body, "response_format": {"type": "json_object"}}).json()["choices"][0]
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "wait", "arguments": "{}"}
    refused = http.post(CHAT, json={**body, "structured_outputs": {"choice": ["x"]}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tool_choice": "required"}, "has no tools"),
        ({"tool_choice": "any", "tools": TOOLS}, "'any'"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": TOOLS}, "'fly'"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "function: Field required"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}, "tools": TOOLS}, "custom"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}, "tools": TOOLS}, "at least 1"),
        ({"tool_choice": "required", "tools": [tool("f", a={"type": 7})]}, "tools: "),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ],
)
def test_choices_that_cannot_act_are_refused(http, fields, why):
    refused = http.post(CHAT, json={"messages": HELLO, **fields})
    assert refused.status_code == 400, refused.text
    assert why in refused.json()["error"]["message"]


# Excerpt of Llama 3.1's chat template, with tools and calls.
LLAMA = """\
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if not message.tool_calls|length == 1 %}{{ raise_exception("single tool-calls at once!") }}{% endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start|>assistant\\n{"name": "' + tool_call.name + '", "parameters": ' + (tool_call.arguments | tojson) + "}" }}
{%- else %}{{- '<|start|>' + message.role + '\\n' }}
{%- if loop.first and tools %}{{- tools | tojson }}{% endif %}{{ message.content }}{% endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}[assistant]"
CALL = '{"name": "paint", "parameters": {"colour": "red", "thick": true}}'


def with_template(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_may_write_calls_without_a_mark():
    assert response_template(with_template(LLAMA), None) == BareForm("name", "parameters")
    listed = LLAMA.replace('\\n{"name', '\\n[{"name').replace('"}" }}', '"}]" }}')
    assert response_template(with_template(listed), None) == BareForm("name", "parameters")
    assert response_template(with_template(PLAIN), None) is None


@pytest.mark.parametrize(
    ("says", "calls", "text"),
    [
        (CALL, 1, ""),
        (f"\n{CALL}; {CALL}\n", 2, ""),
        (f"[{CALL}, {CALL}]", 2, ""),
        ("It is [red].", 0, "It is [red]."),
        ('[1] and {"name": "paint"}', 0, '[1] and {"name": "paint"}'),
        ('{"name": "fly", "parameters": {}}', 0, '{"name": "fly", "parameters": {}}'),
        ('{"name": ["paint"], "parameters": {}}', 0, '{"name": ["paint"], "parameters": {}}'),
        ('{"name": "paint", "param', 0, '{"name": "paint", "param'),
        (f"{CALL} So it is.", 1, " So it is."),
        ("  ", 0, "  "),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_without_a_mark_are_read(says, calls, text, size):
    reader = BareReader(BareForm("name", "parameters"), {"paint"})
    read = [reader.add(says[start : start + size]) for start in range(0, len(says), size)]
    read.append(reader.add("", last=True))
    calls_read = [call for each in read for call in each.calls]
    assert [json.loads(call["function"]["arguments"]) for call in calls_read] == [
        {"colour": "red", "thick": True}
    ] * calls
    assert "".join(each.text for each in read).lstrip() == text.lstrip()


@pytest.mark.parametrize("template", [LLAMA, PLAIN])
@pytest.mark.parametrize("stream", [False, True])
def test_models_without_a_mark_call_tools(template, stream):
    says = {"name": "stop", ("parameters" if template == LLAMA else "arguments"): {"a": 1}}
    model = ScriptedModel(TOKENIZER, json.dumps(says))
    with serving(model, with_template(template)) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        arguments = {"model": "tiny", "messages": HELLO, "tools": TOOLS[2:]}
        if stream:
            with client.chat.completions.stream(**arguments) as chunks:
                answer = chunks.get_final_completion().choices[0]
        else:
            answer = client.chat.completions.create(**arguments).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert [(each.function.name, each.function.arguments) for each in answer.message.tool_calls] == [
        ("stop", '{"a": 1}')
    ]
    assert '"name": "stop"' in TOKENIZER.decode(model.calls[-1]["input_ids"][0])


def test_calls_reach_prompts_of_templates_without_tools():
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}} for name in "xy"]
    results = [{"role": "tool", "tool_call_id": name, "content": f"{name} did"} for name in "xy"]
    body = {"messages": [*HELLO, {"role": "assistant", "tool_calls": calls}, *results, *HELLO]}
    with serving(ScriptedModel(TOKENIZER), with_template(PLAIN)) as running, running.client() as http:
        text = TOKENIZER.decode(http.post("/tokenize", json=body).json()["tokens"])
        with_tools = TOKENIZER.decode(http.post("/tokenize", json={**body, "tools": TOOLS}).json()["tokens"])
    written = '{"name": "x", "arguments": {"a": 1}}\n{"name": "y", "arguments": {"a": 1}}'
    results_text = "[user]Result of x: x did\nResult of y: y did<|end|>"
    assert text == f"[user]Hello<|end|>[assistant]{written}<|end|>{results_text}[user]Hello<|end|>[assistant]"
    assert with_tools.startswith("[user]You can call tools.")
    assert with_tools.endswith(f"Hello<|end|>[assistant]{written}<|end|>{results_text}[user]Hello<|end|>[assistant]")
