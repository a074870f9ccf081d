"""Formats answers for `/v1/responses`, as one response object or as a stream of events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from parallelformers_ng.serving.answers import Piece
from parallelformers_ng.serving.api_errors import ApiError
from parallelformers_ng.serving.requests import ChatRequest
from parallelformers_ng.serving.response_requests import ResponsesRequest
from parallelformers_ng.serving.shapes import Shape


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


class ResponseShape(Shape):
    """Formatter of one answer for `/v1/responses`. For requests without streaming, `add` drops the events."""

    prefix, end = "resp", ""

    def __init__(self, name: str, tokenizer: Any, chat: ChatRequest, request: ResponsesRequest) -> None:
        super().__init__(name, tokenizer, chat)
        self._original = request
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] = {}  # the output item that still grows; {} if there is none
        self._spaces = ""  # white space that waits for other text, because white space alone starts no message
        self._logprobs: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is not sent yet
        self._reasoning_tokens = 0
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._number = 0

    def add(self, piece: Piece) -> None:
        for _ in self.chunks(piece):
            pass

    def opening(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self.whole())

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        self._tokens += piece.tokens
        if piece.read.reasoning:
            self._reasoning_tokens += piece.tokens
            yield from self._continue("reasoning", piece.read.reasoning)
        self._logprobs += [self._likelihood(each) for each in piece.likelihoods]
        text, is_open = self._spaces + piece.read.text, self._open.get("type") == "message"
        if text.isspace() and not is_open:
            self._spaces = text
        elif text or (is_open and self._logprobs):
            yield from self._continue("message", text)
        for call in piece.read.calls:
            self._spaces = ""
            yield from self._call(call)
        if piece.finish:
            self._status = "incomplete" if piece.finish == "length" else "completed"
            if not (self._open or self._output):
                yield from self._continue("message", self._spaces)
            yield from self._close()

    def closing(self) -> Iterator[dict[str, Any]]:
        yield self._event(f"response.{self._status}", response=self.whole())

    def failure(self, error: ApiError) -> dict[str, Any]:
        self._status = "failed"
        self._error = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response=self.whole())

    def event(self, data: dict[str, Any]) -> str:
        return f"event: {data['type']}\n{super().event(data)}"

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _continue(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Add text to the open output item if its type is `kind`; else close that item and begin one of this type."""
        if self._open.get("type") != kind:
            yield from self._close()
            if kind == "message":
                part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item: dict[str, Any] = {"id": _id("msg"), "type": kind, "role": "assistant", "content": []}
            else:
                part = {"type": "reasoning_text", "text": ""}
                item = {"id": _id("rs"), "type": kind, "summary": [], "content": []}
            yield from self._begin(item)
            item["content"] = [dict(part)]
            yield self._event("response.content_part.added", **self._place, content_index=0, part=part)
        part = self._open["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == "message":
            part["logprobs"] += self._logprobs
            more, self._logprobs, self._spaces = {"logprobs": self._logprobs}, [], ""
        yield self._event(f"response.{part['type']}.delta", **self._place, content_index=0, delta=text, **more)

    def _begin(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        item["status"] = "in_progress"
        self._open = item
        yield self._event("response.output_item.added", output_index=len(self._output), item=dict(item))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._open["id"], "output_index": len(self._output)}

    def _close(self) -> Iterator[dict[str, Any]]:
        item = self._open
        if not item:
            return
        if "content" in item:
            part, done = item["content"][0], f"response.{item['content'][0]['type']}.done"
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._event(done, **self._place, content_index=0, text=part["text"], **more)
            yield self._event("response.content_part.done", **self._place, content_index=0, part=part)
        item["status"] = "incomplete" if self._status == "incomplete" else "completed"
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = {}

    def _call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"id": _id("fc"), "type": "function_call", "call_id": call["id"], "name": name, "arguments": ""}
        yield from self._begin(item)
        yield self._event("response.function_call_arguments.delta", **self._place, delta=arguments)
        yield self._event("response.function_call_arguments.done", **self._place, name=name, arguments=arguments)
        item["arguments"] = arguments
        yield from self._close()

    def whole(self) -> dict[str, Any]:
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": self.prompt_tokens + self._tokens,
        }
        return {
            "id": self._common["id"],
            "object": "response",
            "created_at": self._common["created"],
            "model": self._common["model"],
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": [*self._output],
            "usage": usage if self._status in ("completed", "incomplete") else None,
            "store": False,
            "previous_response_id": None,
            "background": False,
            "truncation": "disabled",
            "service_tier": "default",
            **self._original.echo(),
        }
