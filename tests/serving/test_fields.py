"""Tests that each field of OpenAI's and vLLM's requests is supported, refused with a message, or ignored."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from parallelformers_ng.serving.fields import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    IGNORED,
    REFUSED,
    RERANK,
    RESPONSES,
    ROUTES,
    SCORE,
    TOKENIZE,
)
from parallelformers_ng.serving.requests import ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest
from parallelformers_ng.serving.response_requests import ResponsesRequest
from parallelformers_ng.serving.score_requests import RerankRequest, ScoreRequest
from tests.helpers.server import ScriptedModel, serving, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
REQUESTS = {
    each.route: each
    for each in (
        ChatRequest, ResponsesRequest, CompletionRequest, EmbeddingRequest, ScoreRequest, RerankRequest,
        TokenizeRequest,
    )
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "seed": 1},
    COMPLETIONS: {"prompt": "Hello", "seed": 1},
    RESPONSES: {"input": "Hello", "seed": 1},
    TOKENIZE: {"messages": [{"role": "user", "content": "Hello"}]},
}

_SAMPLING = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words response_format structured_outputs priority request_id
    session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    thinking_token_budget stream_interval add_special_tokens
    guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern guided_decoding_backend
    structural_tag
"""
_TEMPLATE = "add_generation_prompt continue_final_message chat_template chat_template_kwargs mm_processor_kwargs"
_POOLING = """model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs
    cache_salt use_activation"""
VLLM = {
    CHAT: f"""{_SAMPLING} {_TEMPLATE} reasoning_effort include_reasoning echo documents media_io_kwargs
        return_prompt_text""",
    COMPLETIONS: f"{_SAMPLING} prompt_embeds",
    RESPONSES: """logit_bias top_k skip_special_tokens include_stop_str_in_output request_id mm_processor_kwargs
        priority cache_salt enable_response_messages previous_input_messages previous_response structured_outputs
        repetition_penalty seed stop ignore_eos vllm_xargs""",
    EMBEDDINGS: """model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs
        cache_salt input add_special_tokens encoding_format embed_dtype endianness dimensions use_activation normalize
        task""",
    SCORE: f"{_POOLING} text_1 text_2 data_1 data_2 queries documents items",
    RERANK: f"{_POOLING} query documents top_n",
    TOKENIZE: f"{_TEMPLATE} model prompt messages add_special_tokens return_token_strs tools media_io_kwargs",
}
"""Fields of vLLM's requests, from vLLM's `entrypoints/openai/*/protocol.py`, `entrypoints/pooling/*/protocol.py` and
`entrypoints/serve/tokenize/protocol.py` of November 2026, and the `guided_` fields of release 0.11."""
OURS = {
    TOKENIZE: {"documents", "reasoning_effort"},  # fields of chats, because this route returns the tokens of chats
    RERANK: {"return_documents"},  # fields of Jina and Cohere
    RESPONSES: {"min_p", "presence_penalty", "frequency_penalty", "stop_token_ids", "min_tokens"},  # fields of chats
}
_SAMPLERS = """
    adapter_id adaptive_decay adaptive_target ban_eos_token best_of cache_prompt custom_logit_processor data_sources
    decoder_input_details details do_sample dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
    dry_sequence_breakers dynatemp_exponent dynatemp_range ebnf enable_thinking encoder_repetition_penalty
    epsilon_cutoff eta_cutoff format grammar_lazy grammar_triggers guidance_scale guideline id_slot image_data
    keep_alive lora lora_path max_completion_tokens max_length max_new_tokens max_output_tokens max_tokens min_keep
    min_length min_new_tokens mirostat mirostat_eta mirostat_mode mirostat_tau n_keep n_predict n_probs
    negative_prompt no_repeat_ngram_size no_stop_trim num_ctx num_predict options penalize_nl plugins provider
    reasoning_budget regex repeat_last_n repeat_penalty return_full_text return_hidden_states return_progress samplers
    separate_reasoning smoothing_curve smoothing_factor stream_reasoning system_prompt t_max_predict_ms
    temperature_last tfs tfs_z think thinking timings_per_token tool_prompt top_a top_n_sigma top_n_tokens transforms
    truncate typical typical_p usage watermark xtc_probability xtc_threshold
"""
_TEXTS = "input_type instruction max_chunks_per_doc max_tokens_per_doc prompt_name truncate truncation"
_RANKING = f"{_TEXTS} rank_fields raw_scores return_text texts"
OTHERS = {
    CHAT: f"{_SAMPLERS} grammar json_schema",
    COMPLETIONS: f"{_SAMPLERS} grammar json_schema reasoning_effort tools",
    RESPONSES: f"{_SAMPLERS} reasoning_effort response_format",
    EMBEDDINGS: f"""{_TEXTS} embedding_type embedding_types late_chunking normalized output_dimension
        output_dtype""",
    SCORE: _RANKING,
    RERANK: _RANKING,
    TOKENIZE: "",
}
"""Fields of llama.cpp, Ollama, TGI, SGLang, text-generation-webui, OpenRouter, Cohere, Jina, Voyage and others, and
fields that OpenAI has on another route."""
OPENAI = {
    CHAT: (chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming),
    COMPLETIONS: (
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
    ),
    EMBEDDINGS: (embedding_create_params.EmbeddingCreateParams,),
    RESPONSES: (
        response_create_params.ResponseCreateParamsNonStreaming,
        response_create_params.ResponseCreateParamsStreaming,
    ),
    SCORE: (),
    RERANK: (),
    TOKENIZE: (),
}


def acting(route: str) -> set[str]:
    return set(REQUESTS[route].model_fields)


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_is_in_one_table(route):
    known = set(VLLM[route].split()).union(*(typing.get_type_hints(each) for each in OPENAI[route]))
    acts = acting(route)
    refused = {name for name, field in REFUSED.items() if route in field.routes}
    ignored = {name for name, field in IGNORED.items() if route in field.routes}
    assert known | OURS.get(route, set()) | set(OTHERS[route].split()) == acts | refused | ignored
    assert len(acts) + len(refused) + len(ignored) == len(acts | refused | ignored)


ASKING: dict[str, Any] = {
    "best_of": 2, "dimensions": 5, "function_call": "auto", "functions": [{"name": "f"}],
    "modalities": ["text", "audio"], "suffix": "y", "do_sample": False, "separate_reasoning": False,
    "stream_reasoning": False,
    "add_special_tokens": False, "echo": True, "embed_dtype": "float16",
    "endianness": "big", "include_reasoning": False, "include_stop_str_in_output": True, "padding": "max_length",
    "priority": 1, "prompt_logprobs": 0, "return_prompt_text": True, "return_token_ids": True,
    "return_token_strs": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False,
    "thinking_token_budget": 0, "use_activation": False, "use_beam_search": True, "watermarking": True,
    "bad_words": ["no"], "prompt_embeds": ["x"], "allowed_token_ids": [1], "logprob_token_ids": [1],
}  # fmt: skip
"""Values that request an effect, for fields with harmless values."""


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    return ScriptedModel(TOKENIZER, "It says so.")


@pytest.fixture(scope="module")
def http(model: ScriptedModel) -> Iterator[httpx.Client]:
    with serving(model, TOKENIZER) as running, running.client() as client:
        yield client


def fields_of(table: dict[str, Any]) -> list[tuple[str, str]]:
    return [(route, name) for name, field in table.items() for route in field.routes if route in BODIES]


@pytest.mark.parametrize(("route", "name"), fields_of(REFUSED))
def test_field_that_would_change_the_answer_is_refused(http, route, name):
    refused = http.post(route, json={**BODIES[route], name: ASKING.get(name, {"x": "y"})})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert f"{name} is not supported: " in refused.json()["error"]["message"]
    for harmless in (None, *REFUSED[name].harmless):
        assert http.post(route, json={**BODIES[route], name: harmless}).status_code == 200


@pytest.mark.parametrize("value", [{"dimensions": 5}, {"add_special_tokens": False}, {"endianness": "big"}])
def test_fields_of_embeddings_are_refused(http, value):
    refused = http.post(EMBEDDINGS, json={"input": "x", **value})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(value)))


@pytest.mark.parametrize(("route", "name"), fields_of(IGNORED))
def test_a_harmless_field_changes_nothing(http, model, route, name):
    answers = [http.post(route, json=body) for body in (BODIES[route], {**BODIES[route], name: {"x": [1]}})]
    assert [answer.status_code for answer in answers] == [200, 200]
    if route != TOKENIZE:
        told = [vars(call["generation_config"]) | {"ids": call["input_ids"].tolist()} for call in model.calls[-2:]]
        assert told[0] == told[1]


def test_priority_reaches_the_batch(http, model):
    for route in (CHAT, COMPLETIONS, RESPONSES):
        for value, priority in ((-3, -3), (None, 0)):
            assert http.post(route, json={**BODIES[route], "priority": value}).status_code == 200
            assert model.calls[-1]["priority"] == priority
        assert http.post(route, json={**BODIES[route], "priority": 0.5}).json()["error"]["param"] == "priority"


def test_a_penalty_of_nothing_is_no_penalty(http, model):
    for value in ({"presence_penalty": 0.0}, {"frequency_penalty": 0}, {"logit_bias": {}}):
        assert http.post(COMPLETIONS, json={**BODIES[COMPLETIONS], **value}).status_code == 200
        assert "logits_processor" not in model.calls[-1]


@pytest.mark.parametrize(
    "value",
    [
        {"presence_penalty": 2.1},
        {"frequency_penalty": -3},
        {"logit_bias": {"1": 101}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"100000": 1}},
        {"logit_bias": {str(token): 1 for token in range(1025)}},
        {"logit_bias": [5]},
    ],
)
def test_penalties_that_cannot_act_are_refused(http, value):
    refused = http.post(COMPLETIONS, json={**BODIES[COMPLETIONS], **value})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith(next(iter(value)))


@pytest.mark.parametrize(
    ("route", "name"),
    [(route, name) for route in BODIES for name in sorted(acting(route) - {"prompt", "messages", "input", "model"})],
)
def test_null_is_a_field_that_is_left_out(http, route, name):
    assert http.post(route, json={**BODIES[route], name: None}).status_code == 200


def test_null_within_a_field_is_left_out(http):
    body = {**BODIES[CHAT], "stream": True, "stream_options": {"include_usage": None}}
    body |= {"tools": None, "response_format": {"type": "text", "json_schema": None}}
    assert http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"structured_outputs": {}}, "has 0"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "has 2"),
        ({"structured_outputs": {"json_object": True, "json": {}}}, "needs exactly one of"),
        ({"structured_outputs": {"choise": ["b"]}}, "choise"),
        ({"structured_outputs": {"choice": []}}, "at least 1"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
        ({"structured_outputs": {"json": "no JSON"}}, "not a JSON object"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "nothing"),
        ({"structured_outputs": {"grammar": "x" * 200_000}}, "characters"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format and guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_schema"}}, "no field json_schema"),
        ({"stop_token_ids": [9999]}, "260 tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(17))}, "limit is 16"),
        ({"min_tokens": 5, "max_tokens": 4}, "limit is 4"),
        ({"stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_values_that_cannot_act_are_refused(http, route, fields, why):
    refused = http.post(route, json={**BODIES[route], **fields})
    assert refused.status_code == 400
    assert why in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"top_logprobs": 2}, "logprobs: true"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "remove one of the two fields"),
        ({"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "function_call"),
    ],
)
def test_values_of_chats_that_cannot_act_are_refused(http, fields, why):
    refused = http.post(CHAT, json={**BODIES[CHAT], **fields})
    assert refused.status_code == 400
    assert why in refused.json()["error"]["message"]
