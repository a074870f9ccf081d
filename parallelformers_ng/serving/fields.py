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
class Unsupported:
    """A field that the server does not support.

    Attributes:
        routes: routes whose requests have the field.
        note: for a refused field, a hint such as a replacement; for an ignored field, the reason why it is harmless.
        harmless: values of a refused field that change nothing; the server accepts these values.
    """

    routes: tuple[str, ...]
    note: str
    harmless: tuple[Any, ...] = ()

    def takes(self, value: Any) -> bool:
        """Return whether a value changes nothing, so that the server accepts the value.

        None changes nothing. 1 and 1.0 are equal here, but 1 and True are different.
        """
        return value is None or any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.harmless
        )


_LATER = "remove the field"
_NOT_STORED = "the server stores no conversations; send the conversation as `input`"
_OF_PROCESSOR = "the server reads pictures with the settings of the model's processor"
REFUSED = {
    # fields of OpenAI
    "audio": Unsupported(_TEXT[:1], "the model answers only with text"),
    "best_of": Unsupported(_TEXT[1:], "set `n`, and choose the best answer yourself", (1,)),
    "dimensions": Unsupported((EMBEDDINGS,), "shorten the embedding yourself"),
    "function_call": Unsupported((CHAT,), "use `tool_choice`", ("none",)),
    "functions": Unsupported((CHAT,), "use `tools`", ([],)),
    "modalities": Unsupported((CHAT,), "the model answers only with text", (["text"],)),
    "moderation": Unsupported((CHAT, RESPONSES), "the server does not moderate text"),
    "suffix": Unsupported((COMPLETIONS,), _LATER, ("",)),
    "verbosity": Unsupported((CHAT,), "state the length of the answer in a message", ("medium",)),
    "web_search_options": Unsupported((CHAT,), "the server does not search the web"),
    "access_programs": Unsupported((RESPONSES,), _LATER),
    "background": Unsupported((RESPONSES,), "wait for the answer, or set `stream`", (False,)),
    "background_options": Unsupported((RESPONSES,), "wait for the answer, or set `stream`"),
    "context_management": Unsupported((RESPONSES,), "shorten the input yourself", ([],)),
    "conversation": Unsupported((RESPONSES,), _NOT_STORED),
    "image": Unsupported((RESPONSES,), _LATER),
    "previous_response_id": Unsupported((RESPONSES,), _NOT_STORED),
    "prompt": Unsupported((RESPONSES,), "send `instructions` and `input`"),
    "truncation": Unsupported((RESPONSES,), "shorten the input yourself", ("disabled",)),
    # fields of vLLM
    "media_io_kwargs": Unsupported(_TEMPLATES, _OF_PROCESSOR, ({},)),
    "mm_processor_kwargs": Unsupported((*_ALL[:2], *_VECTORS, TOKENIZE), _OF_PROCESSOR, ({},)),
    "enable_response_messages": Unsupported((RESPONSES,), "send the messages to `/tokenize`", (False,)),
    "previous_input_messages": Unsupported((RESPONSES,), _NOT_STORED),
    "previous_response": Unsupported((RESPONSES,), _NOT_STORED),
    "add_special_tokens": Unsupported((EMBEDDINGS,), "embedding models need their special tokens", (True,)),
    "allowed_token_ids": Unsupported(_TEXT, "use `structured_outputs`"),
    "bad_words": Unsupported(_TEXT, _LATER, ([],)),
    "cache_salt": Unsupported(_ALL, "start the server with --prefix-tokens 0, so that requests share no prompt caches"),
    "chat_template": Unsupported(_TEMPLATES, "start the server with --chat-template FILE"),
    "echo": Unsupported((CHAT,), "prepend the last message to the answer yourself", (False,)),
    "ec_transfer_params": Unsupported(_TEXT, _LATER, ({},)),
    "embed_dtype": Unsupported((EMBEDDINGS,), "embeddings are float32", ("float32",)),
    "endianness": Unsupported((EMBEDDINGS,), "the server sends base64 in little-endian order", ("native", "little")),
    "include_reasoning": Unsupported((CHAT,), "remove `reasoning_content` from the answer yourself", (True,)),
    "include_stop_str_in_output": Unsupported(_ANSWERS, "append the stop string to the answer yourself", (False,)),
    "kv_transfer_params": Unsupported(_TEXT, _LATER, ({},)),
    "logprob_token_ids": Unsupported(_TEXT, "use `top_logprobs`"),
    "normalize": Unsupported((EMBEDDINGS,), "the model's own modules decide whether vectors are normalized"),
    "padding": Unsupported(_VECTORS, "padding does not change the result", ("do_not_pad",)),
    "priority": Unsupported(_ALL, "the server answers requests in order of arrival", (0,)),
    "prompt_embeds": Unsupported((COMPLETIONS,), "send `prompt`", ([],)),
    "prompt_logprobs": Unsupported(_TEXT, "use `/v1/completions` with `echo` and `logprobs`"),
    "repetition_detection": Unsupported(_TEXT, "use `repetition_penalty`"),
    "return_prompt_text": Unsupported(
        (CHAT,), "send the messages to `/tokenize`, and the tokens to `/detokenize`", (False,)
    ),
    "return_token_ids": Unsupported(_TEXT, "send the text to `/tokenize`", (False,)),
    "return_token_strs": Unsupported((TOKENIZE,), _LATER, (False,)),
    "return_tokens_as_token_ids": Unsupported(_TEXT, "read the exact bytes of each token from `logprobs`", (False,)),
    "skip_special_tokens": Unsupported(_ANSWERS, "an answer contains no special tokens", (True,)),
    "structural_tag": Unsupported(_TEXT, "use `structured_outputs` with a `grammar`"),
    "task": Unsupported((EMBEDDINGS,), _LATER, ("embed",)),
    "thinking_token_budget": Unsupported(_TEXT, "use `max_tokens`", (-1,)),
    "truncate_prompt_tokens": Unsupported(_NO_RESPONSES, "shorten the prompt yourself"),
    "use_activation": Unsupported((EMBEDDINGS,), "the model's own modules decide whether vectors are normalized"),
    "use_beam_search": Unsupported(_TEXT, "set `n`, and choose the best answer yourself", (False,)),
    "vllm_xargs": Unsupported(_ANSWERS, _LATER, ({},)),
    "watermarking": Unsupported(_TEXT, _LATER, (False,)),
}
"""Fields that the server refuses, because they would change the answer."""
IGNORED = {
    # fields of OpenAI
    "max_tool_calls": Unsupported(
        (RESPONSES,), "the field limits tools that a server runs; clients of this server run the tools"
    ),
    "metadata": Unsupported((CHAT,), "the server stores no metadata"),
    "prediction": Unsupported((CHAT,), "the field makes answers faster and does not change the text"),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        Unsupported(
            (CHAT, RESPONSES), "the server reuses the caches of prompts with a common beginning without this field"
        ),
    ),
    "safety_identifier": Unsupported((CHAT, RESPONSES), "the field only names the user"),
    "service_tier": Unsupported((CHAT, RESPONSES), "the server has only one tier"),
    "store": Unsupported((CHAT, RESPONSES), "the server stores no answers; a response has `store: false`"),
    "user": Unsupported(_ALL, "the field only names the user"),
    # fields of vLLM
    "guided_decoding_backend": Unsupported(_TEXT, "the field names a library; llguidance enforces the same grammar"),
    "length_penalty": Unsupported(_TEXT, "the field matters only for beam search, which the server refuses"),
    "request_id": Unsupported(_ALL, "the server chooses the ids of its answers"),
    "return_mm_kwargs": Unsupported(_TEXT, "vLLM uses the field on other routes"),
    "return_token_offsets": Unsupported(_TEXT, "vLLM uses the field on other routes"),
    "routed_experts_prompt_start": Unsupported(_TEXT, "the server does not return which experts ran"),
    "session_id": Unsupported(_TEXT, "the field only names a conversation"),
    "spaces_between_special_tokens": Unsupported(_TEXT, "an answer contains no special tokens"),
    "stream_interval": Unsupported(_TEXT, "the field joins events of a stream and does not change the text"),
    "truncation_side": Unsupported(
        _NO_RESPONSES, "the field matters only with `truncate_prompt_tokens`, which the server refuses"
    ),
}
"""Fields that the server ignores, because they do not change the answer."""
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
