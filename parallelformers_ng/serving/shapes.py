"""Formats answers for OpenAI's API, as one JSON object or as the chunks of a stream."""

from __future__ import annotations

import codecs
import functools
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from parallelformers_ng.serving.answers import Piece
from parallelformers_ng.serving.api_errors import ApiError
from parallelformers_ng.serving.processors import Likelihood
from parallelformers_ng.serving.requests import ChatRequest, CompletionRequest, GenerationRequest

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}


class Shape:
    """Base class of the formatters of answers, one for each route.

    Attributes:
        kind, chunk_kind: values of the field `object` in a complete answer and in a chunk of a stream.
        prefix: beginning of the answer's id.
        prompt_tokens: number of tokens in all prompts of the request; the caller must set it before the first piece.
        end: text after the last event of a stream; "" for no text.
    """

    kind, chunk_kind, prefix = "", "", ""
    end = "data: [DONE]\n\n"

    def __init__(self, name: str, tokenizer: Any, request: GenerationRequest) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer)
        self._request = request
        self.prompt_tokens = 0
        self._tokens = 0
        self._answers: dict[int, Piece] = {}
        self._calls: Counter[int] = Counter()
        answer_id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._common: dict[str, Any] = {"id": answer_id, "created": int(time.time()), "model": name}

    def add(self, piece: Piece) -> None:
        """Store a piece of an answer, so that `whole` can return the answer."""
        self._tokens += piece.tokens
        answer = self._answers.setdefault(piece.index, Piece(piece.index))
        answer.read.text += piece.read.text
        answer.read.reasoning += piece.read.reasoning
        answer.read.calls += piece.read.calls
        answer.likelihoods += piece.likelihoods
        answer.finish = piece.finish

    def whole(self) -> dict[str, Any]:
        """Return the JSON object of the whole response, after `add` has stored all pieces."""
        choices = [self._choice(answer) for _, answer in sorted(self._answers.items())]
        return {**self._common, "object": self.kind, "choices": choices, "usage": self._usage()}

    def opening(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Convert a piece to chunks of a stream, and count its tokens for the field `usage`."""
        self._tokens += piece.tokens
        if choice := self._delta(piece):
            yield self._chunk([choice])

    def closing(self) -> Iterator[dict[str, Any]]:
        """Yield the last chunks of a stream, after all pieces: by default one chunk with the usage, if requested."""
        if self._request.tells_usage:
            yield {**self._chunk([]), "usage": self._usage()}

    def event(self, data: dict[str, Any]) -> str:
        return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def _likelihood(self, each: Likelihood) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in each.top]
        return {**self._entry(each.token, each.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        word, raw = self._token_bytes.text(token), self._token_bytes.bytes(token)
        return {"token": word, "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(raw)}

    def _choice(self, answer: Piece) -> dict[str, Any]:
        """Return the item of `choices` for a complete answer."""
        raise NotImplementedError

    def _delta(self, piece: Piece) -> dict[str, Any] | None:
        """Return the item of `choices` for a piece of a stream; None if the piece adds nothing to the answer."""
        raise NotImplementedError

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._common, "object": self.chunk_kind, "choices": choices}
        return {**chunk, "usage": None} if self._request.tells_usage else chunk

    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self._tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self._tokens, "total_tokens": total}


class ChatShape(Shape):
    """Formatter of answers for `/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    _request: ChatRequest

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(self._request.n or 1):
            yield self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def _choice(self, answer: Piece) -> dict[str, Any]:
        read = answer.read
        message: dict[str, Any] = {"role": "assistant", "content": read.text if read.text or not read.calls else None}
        if read.reasoning:
            message["reasoning_content"] = read.reasoning
        if read.calls:
            message["tool_calls"] = read.calls
        logprobs = self._logprobs(answer.likelihoods)
        return {"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish}

    def _delta(self, piece: Piece) -> dict[str, Any] | None:
        delta: dict[str, Any] = {}
        if piece.read.text or piece.likelihoods:
            delta["content"] = piece.read.text
        if piece.read.reasoning:
            delta["reasoning_content"] = piece.read.reasoning
        if piece.read.calls:
            before = self._calls[piece.index]
            self._calls[piece.index] += len(piece.read.calls)
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(piece.read.calls, start=before)]
        if not delta and not piece.finish:
            return None
        logprobs = self._logprobs(piece.likelihoods)
        return {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish}

    def _logprobs(self, likelihoods: list[Likelihood]) -> dict[str, Any] | None:
        if not likelihoods:
            return None
        return {"content": [self._likelihood(each) for each in likelihoods], "refusal": None}


_MIN_LOGPROB = -9999.0  # sent instead of -inf, which JSON does not have


class CompletionShape(Shape):
    """Formatter of answers for `/v1/completions`.

    Attributes:
        before: likelihoods of each prompt's tokens, beginning with the second token; empty unless the request has
            `echo` and `logprobs`.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    _request: CompletionRequest

    def __init__(self, name: str, tokenizer: Any, request: CompletionRequest, prompts: list[list[int]]) -> None:
        super().__init__(name, tokenizer, request)
        self._prompts = prompts
        self.before: list[list[Likelihood]] = []
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}  # UTF-8 decoder of each answer, by its index
        self._characters: Counter[int] = Counter()
        self._special = set(tokenizer.all_special_ids)

    def opening(self) -> Iterator[dict[str, Any]]:
        if self._request.echo:
            for index in range(len(self._prompts) * (self._request.n or 1)):
                yield self._chunk([self._part(Piece(index), self._echo(index))])

    def _choice(self, answer: Piece) -> dict[str, Any]:
        return self._part(answer, self._echo(answer.index) + answer.read.text)

    def _delta(self, piece: Piece) -> dict[str, Any] | None:
        return self._part(piece, piece.read.text) if piece.read.text or piece.likelihoods or piece.finish else None

    def _part(self, piece: Piece, text: str) -> dict[str, Any]:
        logprobs = self._logprobs(piece.index, piece.likelihoods)
        return {"index": piece.index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _echo(self, index: int) -> str:
        return self._tokenizer.decode(self._prompts[index // (self._request.n or 1)]) if self._request.echo else ""

    def _logprobs(self, index: int, likelihoods: list[Likelihood]) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        logprobs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        prompt = index // (self._request.n or 1)
        if self.before and index not in self._decoders:
            first = self._prompts[prompt][0]
            self._note(logprobs, index, first, None, self._token_bytes.bytes(first))
            for each in self.before[prompt]:
                self._note(logprobs, index, each.token, each, self._token_bytes.bytes(each.token))
        for each in likelihoods:
            shown = b"" if each.token in self._special else self._token_bytes.bytes(each.token)
            self._note(logprobs, index, each.token, each, shown)
        return logprobs

    def _note(self, lists: dict[str, list[Any]], index: int, token: int, each: Likelihood | None, raw: bytes) -> None:
        """Append one token to the lists of the field `logprobs`; `each` is None for the first token of a prompt."""
        if index not in self._decoders:
            self._decoders[index] = codecs.getincrementaldecoder("utf-8")("replace")
            if not self._tokenizer.decode([token]).startswith(" "):
                raw = raw.removeprefix(b" ")  # `decode` drops the space at the start of a text
        text = self._token_bytes.text
        lists["tokens"].append(text(token))
        lists["token_logprobs"].append(each and max(each.logprob, _MIN_LOGPROB))
        lists["top_logprobs"].append(each and {text(other): logprob for other, logprob in each.top})
        lists["text_offset"].append(self._characters[index])  # OpenAI's API counts characters
        self._characters[index] += len(self._decoders[index].decode(raw))


class TokenBytes:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()}

    @functools.cached_property
    def _decoders(self) -> str:
        """JSON of a fast tokenizer's decoders (`decoder` in `tokenizer.json`); "" for a slow tokenizer."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return "" if backend is None else json.dumps(json.loads(backend.to_str())["decoder"], ensure_ascii=False)

    def bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text; b"" if the tokenizer does not know the id.

        A byte-level tokenizer writes bytes as characters of GPT-2's table (`bytes_to_unicode`). A SentencePiece
        tokenizer writes a single byte as `<0x0A>`, and a space as `▁`.
        """
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the model's vocabulary can have more ids than the tokenizer
            return b""
        if '"ByteLevel"' in self._decoders:
            parts = (_OF_CHARACTER.get(each, each) for each in piece)
            return b"".join(bytes([part]) if isinstance(part, int) else part.encode() for part in parts)
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if "▁" in piece and ("▁" in self._decoders or not self._decoders):
            return str(piece.replace("▁", " ")).encode()
        return self._tokenizer.decode([token]).encode()

    def text(self, token: int) -> str:
        """Return the text of a token, with escapes such as `\\xf0\\x9f` if its bytes are not valid UTF-8."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in raw)
