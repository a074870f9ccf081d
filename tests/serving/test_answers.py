"""Tests how a server handles tokens, messages and schemas, without ranks."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys

import pytest
import torch

from parallelformers_ng import ParallelError
from parallelformers_ng.options import FitOptions
from parallelformers_ng.serving import run
from parallelformers_ng.serving.answers import Detokenizer, Stopper
from parallelformers_ng.serving.api_errors import ApiError
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.metrics import Metrics
from parallelformers_ng.serving.model_kinds import Kind
from parallelformers_ng.serving.processors import GrammarError
from parallelformers_ng.serving.requests import Message
from parallelformers_ng.serving.schemas import Schemas
from parallelformers_ng.serving.serve_options import read_serve_options
from parallelformers_ng.serving.structured import Constraint
from parallelformers_ng.serving.tools import AnswerReader, response_template
from tests.helpers.server import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SCHEMAS = Schemas(TOKENIZER, len(TOKENIZER), {TOKENIZER.eos_token_id})
TEXT = "Ünïcode, 中文 and 🙂🙃 — wörds"


def pieces(text: str, sizes: random.Random) -> list[str]:
    parts = []
    while text:
        size = sizes.randint(1, 5)
        parts.append(text[:size])
        text = text[size:]
    return parts


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_text_comes_in_whole_characters(size):
    tokens, text = TOKENIZER(TEXT)["input_ids"], Detokenizer(TOKENIZER)
    shown = [text.add(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    assert "".join(shown) == TEXT
    assert not any("\ufffd" in piece for piece in shown)


def test_incomplete_character_is_shown_at_the_end():
    text = Detokenizer(TOKENIZER)
    assert text.add(TOKENIZER("🙂")["input_ids"][:2]) == ""
    assert text.add([], last=True) == "\ufffd"


@pytest.mark.parametrize("stops", [["abc"], ["b", "abc"], ["aab", "ab"], ["zzz"], []])
def test_text_ends_before_the_first_stop_string(stops):
    sizes = random.Random(3)
    for _ in range(200):
        text = "".join(sizes.choices("abc", k=12))
        stopper = Stopper(stops)
        shown = "".join(map(stopper.add, pieces(text, sizes))) + stopper.add("", last=True)
        whole = min((text.find(stop) for stop in stops if stop in text), default=len(text))
        # A short stop string can end before a longer stop string that contains the short stop string.
        assert text.startswith(shown)
        assert shown == text[:whole] or any(text[len(shown) :].startswith(stop) for stop in stops)
        assert stopper.stopped == any(stop in text for stop in stops)


def test_the_chat_template_says_how_calls_are_written():
    template = response_template(TOKENIZER, None)
    assert template is not None
    calls = template["fields"]["tool_calls"]
    assert (calls["open"], calls["close"], calls["content"]) == ("<tool_call>", "</tool_call>", "json")


TEMPLATES = {
    "mistral": "{{ '[TOOL_CALLS] ' + ([{'name': c.function.name, 'arguments': c.function.arguments}] | tojson) }}",
    "parameters": "{{ '<c>' + ({'name': c.function.name, 'parameters': c.function.arguments} | tojson) + '</c>' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_in_other_forms_are_read(name):
    chat_template = (
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% for c in m.tool_calls or [] %}" + TEMPLATES[name]
    )
    chat_template += "{% endfor %}{{ '<|end|>' if m.role == 'assistant' }}{% endfor %}"
    chat_template += "{{ '[assistant]' if add_generation_prompt }}"
    template = response_template(TOKENIZER, chat_template)
    assert template is not None
    tool_calls = [
        {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"x": [1, {"y": "]}"}]}}}
    ]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": tool_calls}]
    written = TOKENIZER.apply_chat_template(messages, chat_template=chat_template, tokenize=False)
    reader = AnswerReader(TOKENIZER, template, "", [])
    read = [reader.add(piece) for piece in (written.split("[assistant]")[1].removesuffix("<|end|>"))]
    calls = [call for each in (*read, reader.add("", last=True)) for call in each.calls]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"x": [1, {"y": "]}"}]}]
    assert "".join(each.text for each in read).strip() == ""


def test_a_template_that_writes_no_calls_says_so():
    assert response_template(TOKENIZER, "{% for m in messages %}{{ m.content }}{% endfor %}") is None


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_text_that_resembles_a_call_is_text(size):
    template, text = response_template(TOKENIZER, None), 'so <tool_call>{"name": </tool_call> and on <tool'
    assert template is not None
    reader = AnswerReader(TOKENIZER, template, "", [])
    shown = "".join(reader.add(text[start : start + size]).text for start in range(0, len(text), size))
    assert shown + reader.add("", last=True).text == text


@pytest.mark.parametrize("properties", [{"a": {"anyOf": 5}}, {"a": {"type": 7}}, [], {"a": None}])
def test_tool_with_invalid_schema_is_harmless(properties):
    template, text = response_template(TOKENIZER, None), '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'
    assert template is not None
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    reader = AnswerReader(TOKENIZER, template, "", tools)
    read = reader.add(text)
    assert read.calls or read.text == text


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "poet", "content": "x"}, "no such role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image_url"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "not valid JSON"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]}, "too deeply"),
    ],
)
def test_messages_that_no_prompt_is_made_of(message, why):
    with pytest.raises(ApiError, match=why) as error:
        Chat(TOKENIZER).prompt([Message(**message)], [])
    assert error.value.status == 400


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["cat", "dog"]},
        "old": {"type": "boolean"},
    },
    "required": ["name", "kind", "old"],
    "additionalProperties": False,
}


def test_constrained_answers_meet_their_schema():
    end, random_scores = TOKENIZER.eos_token_id, torch.Generator().manual_seed(1)
    for _ in range(10):
        grammar, ids = SCHEMAS.processor(SCHEMAS.grammar(Constraint("json", SCHEMA)), prompt=2), torch.tensor([[1, 2]])
        while ids[0, -1] != end:
            scores = grammar(ids, torch.randn(1, len(TOKENIZER), generator=random_scores))
            ids = torch.cat((ids, scores.argmax(-1, keepdim=True)), -1)
        answer = json.loads(TOKENIZER.decode(ids[0, 2:-1]))
        assert answer.keys() == SCHEMA["properties"].keys()
        assert answer["kind"] in ("cat", "dog")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no such type"},
        {"type": "string", "pattern": "(" * 50},
        {"$ref": "http://127.0.0.1/schema.json"},
        {"$ref": "#/$defs/none"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {
            "type": "object",
            "properties": {f"p{number}": {} for number in range(3000)},
        },  # reading the grammar takes one second on each rank
        {"anyOf": [{"type": "object", "required": [f"a{number}"]} for number in range(3000)]},
        {"enum": [f"x{number}" for number in range(8000)]},
        {"enum": ["x" * (128 << 10)]},
    ],
)
def test_schemas_that_cannot_be_kept_to_are_refused(schema):
    with pytest.raises(ApiError) as error:
        SCHEMAS.grammar(Constraint("json", schema))
    assert error.value.status == 400


def test_large_schemas_are_kept_to():
    properties = {f"p{number}": {"type": "string"} for number in range(800)}
    grammar = SCHEMAS.processor(SCHEMAS.grammar(Constraint("json", {"properties": properties})), 0)
    assert grammar(torch.tensor([[1]])[:, :0], torch.zeros(1, len(TOKENIZER))).isfinite().any()


@pytest.mark.parametrize(("words", "returns"), [(10, 0), (2000, 1)])
def test_memory_of_a_large_grammar_is_returned(words, returns, monkeypatch):
    back = []
    monkeypatch.setattr("parallelformers_ng.serving.processors.trim_heap", lambda: back.append(1))
    grammar = SCHEMAS.processor(
        SCHEMAS.grammar(Constraint("json", {"enum": [f"x{number}" for number in range(words)]})), 1
    )
    grammar(torch.tensor([[1]]), torch.zeros(1, len(TOKENIZER)))
    assert not back
    del grammar
    assert len(back) == returns


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(((a{0,99}){0,99}){0,99}){0,99}b"},
        {"type": "string", "pattern": "(.*a.{18}b)|(.*b.{19}a)"},
        {"enum": [f"x{number}" for number in range(12_000)]},
        {"allOf": [{"properties": {f"p{n}": {"pattern": f"a{n}.*"} for n in range(20)}} for _ in range(30)]},
    ],
)
def test_exploding_schemas_are_refused_or_slow(schema):
    ids = torch.tensor([[1]])
    try:
        grammar = SCHEMAS.processor(SCHEMAS.grammar(Constraint("json", schema)), 1)
        for _ in range(10):
            scores = grammar(ids, torch.zeros(1, len(TOKENIZER)))
            ids = torch.cat((ids, scores.argmax(-1, keepdim=True)), -1)
    except (ApiError, GrammarError) as error:
        assert re.search("too|max", str(error))  # noqa: PT017 (some schemas are slow, and not refused)


def test_answers_are_counted_while_waiting_and_written():
    metrics = Metrics("tiny")
    answer = metrics.arrive()
    assert (metrics.running, metrics.waiting, metrics.rate) == (0, 1, 0)
    metrics.wrote(answer, 20)
    assert (metrics.running, metrics.waiting) == (1, 0)
    assert metrics.rate > 0
    metrics.leave(answer)
    metrics.leave(metrics.arrive())  # this answer ends without a token
    assert metrics.in_flight == 0
    assert b'vllm:generation_tokens_total{model_name="tiny"} 20.0' in metrics.page()
    assert b'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0' in metrics.page()


def test_flags_count_before_the_file(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text('model = "a"\nport = 9000\nrows = 4\ncors = ["https://example.org"]\n')
    options = read_serve_options(str(file), {"port": 9001})
    assert (options.model, options.port, options.rows, options.cors) == ("a", 9001, 4, ["https://example.org"])


def test_layout_options_reach_the_workers(tmp_path, monkeypatch):
    file = tmp_path / "server.toml"
    file.write_text('model = "a"\nratio = [1, 3]\nmax_memory = ["0=10GiB", "1=4", "cpu=1GB"]\n')
    options_seen = {}
    monkeypatch.setattr(run, "parallelize", lambda *_, **options: options_seen.update(options))
    monkeypatch.setattr(run.AutoTokenizer, "from_pretrained", lambda *_, **__: None)
    run.load(read_serve_options(str(file), {"strategy": "auto", "cache": "int8", "offload_folder": "o"}), Kind())
    sizes = {0: "10GiB", 1: 4, "cpu": "1GB"}
    assert options_seen["fit"] == FitOptions("auto", None, [1, 3], sizes, "o", "int8")
    run.load(read_serve_options(None, {"model": "a"}), Kind())
    assert options_seen["fit"] == FitOptions()
    run.load(read_serve_options(None, {"model": "a", "strategy": "tensor+pipeline", "tensor": 2}), Kind())
    assert options_seen["fit"] == FitOptions("tensor+pipeline", 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('model = "a"\nprot = 1', "did you mean 'port'"),
        ('model = "a"\nprefill_chunk = 64', "no option 'prefill_chunk'; set prefill_patience"),
        ('model = "a"\nport = "x"', "port is 'x'; it takes int"),
        ('model = "a"\nport = true', "port is True; it takes int"),
        ('model = "a"\nport = 70000', "65535"),
        ('model = "a"\nrows = 0', "at least 1"),
        ("port = 1", "no model"),
        ("port = ", "not valid TOML"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, text, why):
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(ParallelError, match=why):
        read_serve_options(str(file), {})


CHAINS = {
    "rules": """Constraint("grammar", "\\n".join(
        ["start: r0", *(f"r{n}: r{n + 1}" for n in range(3500)), 'r3500: "x"']))""",
    "references": """Constraint("json", {"$ref": "#/$defs/d0", "$defs": {
        f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} if n < 1500 else {} for n in range(1501)}})""",
}


@pytest.mark.parametrize(
    "chain", [pytest.param(chain, marks=[pytest.mark.slow] * (chain != "rules")) for chain in CHAINS]
)
def test_long_chains_of_rules_do_not_crash(chain):
    """The test runs in a separate process, because a stack overflow would end the process."""
    code = f"""
import torch
from tests.serving.test_answers import SCHEMAS, ApiError, Constraint, GrammarError
try:
    grammar = SCHEMAS.processor(SCHEMAS.grammar({CHAINS[chain]}), 0)
    grammar(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 260))
except (ApiError, GrammarError) as error:
    print(error)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
