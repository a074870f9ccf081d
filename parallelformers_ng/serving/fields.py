"""Lists the fields of OpenAI's and vLLM's requests that the server refuses, ignores or supports, with notes."""

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
    """A field that the server does not support, and refuses because the field would change the answer.

    Attributes:
        routes: routes whose requests have the field.
        instead: hint for the caller, such as a replacement for the field.
        harmless: values that change nothing; the server accepts these values.
    """

    routes: tuple[str, ...]
    instead: str
    harmless: tuple[Any, ...] = ()

    def takes(self, value: Any) -> bool:
        """Return whether a value changes nothing, so that the server accepts the value.

        None changes nothing. 1 and 1.0 are equal here, but 1 and True are different.
        """
        return value is None or any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.harmless
        )


@dataclass(frozen=True)
class Ignored:
    """A field that the server ignores because the field does not change the answer.

    Attributes:
        routes: routes whose requests have the field.
        why: reason why the field does not change the answer.
    """

    routes: tuple[str, ...]
    why: str


_LATER = "remove the field"
_NOT_STORED = "the server stores no conversations; send the conversation as `input`"
_OF_PROCESSOR = "the server reads pictures with the settings of the model's processor"
REFUSED = {
    # fields of OpenAI
    "audio": Refused(_TEXT[:1], "the model answers only with text"),
    "best_of": Refused(_TEXT[1:], "set `n`, and choose the best answer yourself", (1,)),
    "dimensions": Refused((EMBEDDINGS,), "shorten the embedding yourself"),
    "function_call": Refused((CHAT,), "use `tool_choice`", ("none",)),
    "functions": Refused((CHAT,), "use `tools`", ([],)),
    "modalities": Refused((CHAT,), "the model answers only with text", (["text"],)),
    "moderation": Refused((CHAT, RESPONSES), "the server does not moderate text"),
    "suffix": Refused((COMPLETIONS,), _LATER, ("",)),
    "verbosity": Refused((CHAT,), "state the length of the answer in a message", ("medium",)),
    "web_search_options": Refused((CHAT,), "the server does not search the web"),
    "access_programs": Refused((RESPONSES,), _LATER),
    "background": Refused((RESPONSES,), "wait for the answer, or set `stream`", (False,)),
    "background_options": Refused((RESPONSES,), "wait for the answer, or set `stream`"),
    "context_management": Refused((RESPONSES,), "shorten the input yourself", ([],)),
    "conversation": Refused((RESPONSES,), _NOT_STORED),
    "image": Refused((RESPONSES,), _LATER),
    "previous_response_id": Refused((RESPONSES,), _NOT_STORED),
    "prompt": Refused((RESPONSES,), "send `instructions` and `input`"),
    "truncation": Refused((RESPONSES,), "shorten the input yourself", ("disabled",)),
    # fields of vLLM
    "media_io_kwargs": Refused(_TEMPLATES, _OF_PROCESSOR, ({},)),
    "mm_processor_kwargs": Refused((*_ALL[:2], *_VECTORS, TOKENIZE), _OF_PROCESSOR, ({},)),
    "enable_response_messages": Refused((RESPONSES,), "send the messages to `/tokenize`", (False,)),
    "previous_input_messages": Refused((RESPONSES,), _NOT_STORED),
    "previous_response": Refused((RESPONSES,), _NOT_STORED),
    "add_special_tokens": Refused((EMBEDDINGS,), "embedding models need their special tokens", (True,)),
    "allowed_token_ids": Refused(_TEXT, "use `structured_outputs`"),
    "bad_words": Refused(_TEXT, _LATER, ([],)),
    "cache_salt": Refused(_ALL, "start the server with --prefix-tokens 0, so that requests share no prompt caches"),
    "chat_template": Refused(_TEMPLATES, "start the server with --chat-template FILE"),
    "echo": Refused((CHAT,), "prepend the last message to the answer yourself", (False,)),
    "ec_transfer_params": Refused(_TEXT, _LATER, ({},)),
    "embed_dtype": Refused((EMBEDDINGS,), "embeddings are float32", ("float32",)),
    "endianness": Refused((EMBEDDINGS,), "the server sends base64 in little-endian order", ("native", "little")),
    "include_reasoning": Refused((CHAT,), "remove `reasoning_content` from the answer yourself", (True,)),
    "include_stop_str_in_output": Refused(_ANSWERS, "append the stop string to the answer yourself", (False,)),
    "kv_transfer_params": Refused(_TEXT, _LATER, ({},)),
    "logprob_token_ids": Refused(_TEXT, "use `top_logprobs`"),
    "normalize": Refused((EMBEDDINGS,), "the model's own modules decide whether vectors are normalized"),
    "padding": Refused(_VECTORS, "padding does not change the result", ("do_not_pad",)),
    "priority": Refused(_ALL, "the server answers requests in order of arrival", (0,)),
    "prompt_embeds": Refused((COMPLETIONS,), "send `prompt`", ([],)),
    "prompt_logprobs": Refused(_TEXT, "use `/v1/completions` with `echo` and `logprobs`"),
    "repetition_detection": Refused(_TEXT, "use `repetition_penalty`"),
    "return_prompt_text": Refused(
        (CHAT,), "send the messages to `/tokenize`, and the tokens to `/detokenize`", (False,)
    ),
    "return_token_ids": Refused(_TEXT, "send the text to `/tokenize`", (False,)),
    "return_token_strs": Refused((TOKENIZE,), _LATER, (False,)),
    "return_tokens_as_token_ids": Refused(_TEXT, "read the exact bytes of each token from `logprobs`", (False,)),
    "skip_special_tokens": Refused(_ANSWERS, "an answer contains no special tokens", (True,)),
    "structural_tag": Refused(_TEXT, "use `structured_outputs` with a `grammar`"),
    "task": Refused((EMBEDDINGS,), _LATER, ("embed",)),
    "thinking_token_budget": Refused(_TEXT, "use `max_tokens`", (-1,)),
    "truncate_prompt_tokens": Refused(_NO_RESPONSES, "shorten the prompt yourself"),
    "use_activation": Refused((EMBEDDINGS,), "the model's own modules decide whether vectors are normalized"),
    "use_beam_search": Refused(_TEXT, "set `n`, and choose the best answer yourself", (False,)),
    "vllm_xargs": Refused(_ANSWERS, _LATER, ({},)),
    "watermarking": Refused(_TEXT, _LATER, (False,)),
}
IGNORED = {
    # fields of OpenAI
    "max_tool_calls": Ignored(
        (RESPONSES,), "the field limits tools that a server runs; clients of this server run the tools"
    ),
    "metadata": Ignored((CHAT,), "the server stores no metadata"),
    "prediction": Ignored((CHAT,), "the field makes answers faster and does not change the text"),
    "prompt_cache_key": Ignored(
        (CHAT, RESPONSES), "the server reuses the caches of prompts with a common beginning without this field"
    ),
    "prompt_cache_options": Ignored(
        (CHAT, RESPONSES), "the server reuses the caches of prompts with a common beginning without this field"
    ),
    "prompt_cache_retention": Ignored(
        (CHAT, RESPONSES), "the server reuses the caches of prompts with a common beginning without this field"
    ),
    "safety_identifier": Ignored((CHAT, RESPONSES), "the field only names the user"),
    "service_tier": Ignored((CHAT, RESPONSES), "the server has only one tier"),
    "store": Ignored((CHAT, RESPONSES), "the server stores no answers; a response has `store: false`"),
    "user": Ignored(_ALL, "the field only names the user"),
    # fields of vLLM
    "guided_decoding_backend": Ignored(_TEXT, "the field names a library; llguidance enforces the same grammar"),
    "length_penalty": Ignored(_TEXT, "the field matters only for beam search, which the server refuses"),
    "request_id": Ignored(_ALL, "the server chooses the ids of its answers"),
    "return_mm_kwargs": Ignored(_TEXT, "vLLM uses the field on other routes"),
    "return_token_offsets": Ignored(_TEXT, "vLLM uses the field on other routes"),
    "routed_experts_prompt_start": Ignored(_TEXT, "the server does not return which experts ran"),
    "session_id": Ignored(_TEXT, "the field only names a conversation"),
    "spaces_between_special_tokens": Ignored(_TEXT, "an answer contains no special tokens"),
    "stream_interval": Ignored(_TEXT, "the field joins events of a stream and does not change the text"),
    "truncation_side": Ignored(
        _NO_RESPONSES, "the field matters only with `truncate_prompt_tokens`, which the server refuses"
    ),
}
NOTES = {
    "add_generation_prompt": "default true; false: the prompt ends without the start of the assistant's message",
    "add_special_tokens": "whether the tokenizer adds special tokens; default true for prompts, false for messages",
    "chat_template_kwargs": "variables of the chat template",
    "continue_final_message": "true: the answer continues the last message; excludes `add_generation_prompt: true`",
    "data_1": "alias of `text_1`",
    "data_2": "alias of `text_2`",
    "documents": "in chats: variable of the chat template; in scores: alias of `text_2`; in reranks: texts to sort",
    "frequency_penalty": "penalty for each previous occurrence of a token in the answer, -2 to 2",
    "guided_choice": "older alias of `structured_outputs.choice`",
    "guided_grammar": "older alias of `structured_outputs.grammar`",
    "guided_json": "older alias of `structured_outputs.json`",
    "guided_regex": "older alias of `structured_outputs.regex`",
    "guided_whitespace_pattern": "older alias of `structured_outputs.whitespace_pattern`",
    "ignore_eos": "true: the answer continues after an end token; not allowed with constraints",
    "include": "`message.output_text.logprobs` adds log-probabilities; the server ignores other values",
    "items": "alias of `text_2`",
    "input": "in embeddings: texts; in responses: text, messages, function calls and function outputs",
    "instructions": "system message before the input",
    "logit_bias": "map of token ids, written as text, to numbers from -100 to 100 that are added to the logits",
    "min_tokens": "minimum number of tokens before the answer may end; a complete constraint ends the answer earlier",
    "n": "number of answers for each prompt; the seeds are `seed`, `seed + 1`, …",
    "parallel_tool_calls": "false: at most one tool call; the server drops further calls of the model",
    "presence_penalty": "penalty for each token that occurs in the answer, -2 to 2",
    "reasoning_effort": "variable of the chat template; `none` also sets `enable_thinking` to false",
    "queries": "alias of `text_1`",
    "reasoning": "the key `effort` is the same as `reasoning_effort` in chats",
    "repetition_penalty": "above 1 makes tokens of the prompt and the answer less likely; default from the model",
    "response_format": "`text`, `json_object` or `json_schema`; the server enforces the schema at each token",
    "seed": "seed of the sampling; by default the server draws a random seed",
    "stop": "stop strings; the answer ends before the first stop string",
    "stop_token_ids": "ids of tokens that end the answer; the answer includes the end token unless it is special",
    "structured_outputs": "`json`, `regex`, `choice`, `grammar` (Lark or GBNF) or `json_object`;"
    " `disable_any_whitespace`, `disable_additional_properties`, `whitespace_pattern`",
    "text_1": "one text, or as many texts as `text_2` has",
    "text": "object with the key `format`: `text`, `json_object` or `json_schema`",
    "tool_choice": "`auto`, `none`, `required`, an object that names a function, or `allowed_tools`",
    "top_n": "maximum number of results; 0 returns every result",
    "top_k": "number of most likely tokens to sample from; 0 or -1 is no limit",
    "use_activation": "false: scores are logits without the activation function",
    "top_logprobs": "number of most likely tokens to return at each position; in chats, needs `logprobs: true`",
}
"""Notes on supported fields whose names do not explain the effect."""
