"""Fields of OpenAI's and vLLM's requests that do not act: each is refused in words, or ignored for a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CHAT, RESPONSES, COMPLETIONS, EMBEDDINGS, SCORE, RERANK, TOKENIZE = ROUTES = (
    "/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank", "/tokenize"
)  # fmt: skip
_TEXT = (CHAT, COMPLETIONS)
_ANSWERS = (CHAT, RESPONSES, COMPLETIONS)
_TEMPLATES = (CHAT, TOKENIZE)
_VECTORS = (EMBEDDINGS, SCORE, RERANK)
_NO_RESPONSES = (CHAT, COMPLETIONS, *_VECTORS)
_ALL = (CHAT, RESPONSES, COMPLETIONS, *_VECTORS)


@dataclass(frozen=True)
class Refused:
    """A field that would change the answer, and does not act.

    Attributes:
        routes: routes whose requests have the field.
        instead: next step of the caller.
        harmless: values that ask for nothing, which are taken.
    """

    routes: tuple[str, ...]
    instead: str
    harmless: tuple[Any, ...] = ()

    def takes(self, value: Any) -> bool:
        """Return whether a value asks for nothing."""
        return value is None or any(type(value) in _like(each) and value == each for each in self.harmless)


@dataclass(frozen=True)
class Ignored:
    """A field that does not change the answer.

    Attributes:
        routes: routes whose requests have the field.
        why: why it is harmless.
    """

    routes: tuple[str, ...]
    why: str


def _like(value: Any) -> tuple[type, ...]:
    """Return the types that a value may have in JSON."""
    return (int, float) if type(value) in (int, float) else (type(value),)


_LATER = "leave it out"
_NOT_STORED = "nothing is stored; send the conversation as input"
_OF_PROCESSOR = "pictures are read as the model's processor is set"
REFUSED = {
    # of OpenAI
    "audio": Refused(_TEXT[:1], "the model answers with text"),
    "best_of": Refused(_TEXT[1:], "ask for n answers, and choose", (1,)),
    "dimensions": Refused((EMBEDDINGS,), "cut the embedding yourself"),
    "function_call": Refused((CHAT,), "use tool_choice", ("none",)),
    "functions": Refused((CHAT,), "use tools", ([],)),
    "modalities": Refused((CHAT,), "the model answers with text", (["text"],)),
    "moderation": Refused((CHAT, RESPONSES), "the server does not moderate"),
    "suffix": Refused((COMPLETIONS,), _LATER, ("",)),
    "verbosity": Refused((CHAT,), "ask for it in a message", ("medium",)),
    "web_search_options": Refused((CHAT,), "the server searches nothing"),
    "access_programs": Refused((RESPONSES,), _LATER),
    "background": Refused((RESPONSES,), "wait for the answer, or stream it", (False,)),
    "background_options": Refused((RESPONSES,), "wait for the answer, or stream it"),
    "context_management": Refused((RESPONSES,), "shorten the input yourself", ([],)),
    "conversation": Refused((RESPONSES,), _NOT_STORED),
    "image": Refused((RESPONSES,), _LATER),
    "previous_response_id": Refused((RESPONSES,), _NOT_STORED),
    "prompt": Refused((RESPONSES,), "send instructions and input"),
    "truncation": Refused((RESPONSES,), "shorten the input yourself", ("disabled",)),
    # of vLLM
    "media_io_kwargs": Refused(_TEMPLATES, _OF_PROCESSOR, ({},)),
    "mm_processor_kwargs": Refused((*_ALL[:2], *_VECTORS, TOKENIZE), _OF_PROCESSOR, ({},)),
    "enable_response_messages": Refused((RESPONSES,), "ask /tokenize", (False,)),
    "previous_input_messages": Refused((RESPONSES,), _NOT_STORED),
    "previous_response": Refused((RESPONSES,), _NOT_STORED),
    "add_special_tokens": Refused((EMBEDDINGS,), "embedders need their special tokens", (True,)),
    "allowed_token_ids": Refused(_TEXT, "use structured_outputs"),
    "bad_words": Refused(_TEXT, _LATER, ([],)),
    "cache_salt": Refused(_ALL, "start the server with --prefix-tokens 0, which shares no prompts between requests"),
    "chat_template": Refused(_TEMPLATES, "start the server with --chat-template FILE"),
    "echo": Refused((CHAT,), "put the last message before the answer yourself", (False,)),
    "ec_transfer_params": Refused(_TEXT, _LATER, ({},)),
    "embed_dtype": Refused((EMBEDDINGS,), "embeddings are float32", ("float32",)),
    "endianness": Refused((EMBEDDINGS,), "base64 is little-endian", ("native", "little")),
    "include_reasoning": Refused((CHAT,), "leave reasoning_content out of the answer yourself", (True,)),
    "include_stop_str_in_output": Refused(_ANSWERS, "add the stop string yourself", (False,)),
    "kv_transfer_params": Refused(_TEXT, _LATER, ({},)),
    "logprob_token_ids": Refused(_TEXT, "use top_logprobs"),
    "normalize": Refused((EMBEDDINGS,), "the model's own modules say whether vectors are normalized"),
    "padding": Refused(_VECTORS, "padding changes no vector here", ("do_not_pad",)),
    "priority": Refused(_ALL, "requests are served in the order in which they come", (0,)),
    "prompt_embeds": Refused((COMPLETIONS,), "send a prompt", ([],)),
    "prompt_logprobs": Refused(_TEXT, "use /v1/completions with echo and logprobs"),
    "repetition_detection": Refused(_TEXT, "use repetition_penalty"),
    "return_prompt_text": Refused((CHAT,), "ask /tokenize", (False,)),
    "return_token_ids": Refused(_TEXT, "ask /tokenize", (False,)),
    "return_token_strs": Refused((TOKENIZE,), _LATER, (False,)),
    "return_tokens_as_token_ids": Refused(_TEXT, "the bytes of logprobs are the token's own", (False,)),
    "skip_special_tokens": Refused(_ANSWERS, "special tokens are no part of an answer", (True,)),
    "structural_tag": Refused(_TEXT, "use structured_outputs with a grammar"),
    "task": Refused((EMBEDDINGS,), _LATER, ("embed",)),
    "thinking_token_budget": Refused(_TEXT, "use max_tokens", (-1,)),
    "truncate_prompt_tokens": Refused(_NO_RESPONSES, "cut the prompt yourself"),
    "use_activation": Refused((EMBEDDINGS,), "the model's own modules say whether vectors are normalized"),
    "use_beam_search": Refused(_TEXT, "ask for n answers, and choose", (False,)),
    "vllm_xargs": Refused(_ANSWERS, _LATER, ({},)),
    "watermarking": Refused(_TEXT, _LATER, (False,)),
}
IGNORED = {
    # of OpenAI
    "max_tool_calls": Ignored((RESPONSES,), "it counts tools that a server runs; here the client runs them"),
    "metadata": Ignored((CHAT,), "nothing is stored"),
    "prediction": Ignored((CHAT,), "it makes answers faster, not other ones"),
    "prompt_cache_key": Ignored((CHAT, RESPONSES), "prompts that begin alike are found without it"),
    "prompt_cache_options": Ignored((CHAT, RESPONSES), "prompts that begin alike are found without it"),
    "prompt_cache_retention": Ignored((CHAT, RESPONSES), "prompts that begin alike are found without it"),
    "safety_identifier": Ignored((CHAT, RESPONSES), "it names the user"),
    "service_tier": Ignored((CHAT, RESPONSES), "there is one tier"),
    "store": Ignored((CHAT, RESPONSES), "nothing is stored; a response says `store: false`"),
    "user": Ignored(_ALL, "it names the user"),
    # of vLLM
    "guided_decoding_backend": Ignored(_TEXT, "it names a library; llguidance keeps to the same grammar"),
    "length_penalty": Ignored(_TEXT, "it acts in beam search, which is refused"),
    "request_id": Ignored(_ALL, "the server names its answers itself"),
    "return_mm_kwargs": Ignored(_TEXT, "vLLM has it for other routes"),
    "return_token_offsets": Ignored(_TEXT, "vLLM has it for other routes"),
    "routed_experts_prompt_start": Ignored(_TEXT, "no route of experts is returned"),
    "session_id": Ignored(_TEXT, "it names a conversation"),
    "spaces_between_special_tokens": Ignored(_TEXT, "special tokens are no part of an answer"),
    "stream_interval": Ignored(_TEXT, "it joins events of a stream, whose text is the same"),
    "truncation_side": Ignored(_NO_RESPONSES, "it acts with truncate_prompt_tokens, which is refused"),
}
NOTES = {
    "add_generation_prompt": "true by default; false leaves the begin of an answer out of the prompt",
    "add_special_tokens": "as the tokenizer adds them: true by default for a prompt, false for messages",
    "chat_template_kwargs": "variables of the chat template",
    "continue_final_message": "the answer continues the last message; excludes `add_generation_prompt`",
    "data_1": "another name of `text_1`",
    "data_2": "another name of `text_2`",
    "documents": "of a chat: a variable of the chat template; of a score: `text_2`; of a rerank: texts",
    "frequency_penalty": "times the occurrences of a token in the answer",
    "guided_choice": "older name of `structured_outputs.choice`",
    "guided_grammar": "older name of `structured_outputs.grammar`",
    "guided_json": "older name of `structured_outputs.json`",
    "guided_regex": "older name of `structured_outputs.regex`",
    "guided_whitespace_pattern": "older name of `structured_outputs.whitespace_pattern`",
    "ignore_eos": "the answer goes on after a token that ends texts; excludes constraints",
    "include": "`message.output_text.logprobs` acts; others name things that are in no answer here",
    "items": "another name of `text_2`",
    "input": "of embeddings: texts; of a response: text, messages, calls of functions and their outputs",
    "instructions": "a system message before the input",
    "logit_bias": "ids of tokens, as text, and what is added to their scores, -100 to 100",
    "min_tokens": "tokens before an end, a stop token or a stop string counts; a constraint that is met goes before it",
    "n": "answers of a prompt, with the seeds `seed`, `seed + 1`, …",
    "parallel_tool_calls": "false: one call; of an answer that is not forced, the first alone is told",
    "presence_penalty": "once for each token of the answer",
    "reasoning_effort": "a variable of the chat template; it also sets `enable_thinking`, to false for none",
    "queries": "another name of `text_1`",
    "reasoning": "its `effort` acts as `reasoning_effort`",
    "repetition_penalty": "factor of tokens of prompt and answer; the model's own by default",
    "response_format": "text, json_object or json_schema; schemas are kept to token by token",
    "seed": "by default the server draws one",
    "stop": "the answer ends before the string",
    "stop_token_ids": "the answer ends with the token, which is part of its text unless it is a special one",
    "structured_outputs": "`json`, `regex`, `choice`, `grammar` (Lark or GBNF) or `json_object`;"
    " `disable_any_whitespace`, `disable_additional_properties`, `whitespace_pattern`",
    "text_1": "one text, or as many as `text_2`",
    "text": "`format`: text, json_object or json_schema",
    "tool_choice": "auto, none, required, a named function, or `allowed_tools`",
    "top_n": "results that are told; 0 for all",
    "top_k": "0 or -1 cut nothing off",
    "use_activation": "false: the logit itself",
    "top_logprobs": "with `logprobs`",
}
"""Effects of acting fields whose name does not tell."""
