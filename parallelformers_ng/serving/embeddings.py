"""Answers `/v1/embeddings` with one vector for each text."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import torch
from tokenizers import normalizers

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.engine import Engine
from parallelformers_ng.serving.forwards import run_rows
from parallelformers_ng.serving.pooling import Pooling
from parallelformers_ng.serving.requests import EmbeddingRequest
from parallelformers_ng.serving.serve_options import ServeOptions


class Embeddings:
    """Handler of requests for embeddings.

    Args:
        engine: engine of the model.
        chat: tokenizer of the model. If the pooling lower-cases texts, the constructor changes the tokenizer's
            normalizer.
        options: limits of the server.
        pooling: pooling of the model's outputs; None if the model makes no embeddings.

    Raises:
        UnsupportedModelError: the pooling lower-cases texts, but the tokenizer is not a fast tokenizer.
    """

    def __init__(self, engine: Engine, chat: Chat, options: ServeOptions, pooling: Pooling | None) -> None:
        self._engine = engine
        self._chat = chat
        self._options = options
        self._pooling = pooling
        most = engine.longest if pooling is None else pooling.max_tokens or engine.longest
        self._longest = min(engine.longest, most, chat.tokenizer.model_max_length)
        if pooling is not None and pooling.lower_case:
            _lower_case(chat.tokenizer)

    async def embed(self, request: EmbeddingRequest) -> dict[str, Any]:
        """Answer a request to `/v1/embeddings`.

        Returns:
            JSON object in OpenAI's format, with one embedding for each text. An embedding is a list of numbers, or
            base64 of little-endian float32 values.

        Raises:
            ApiError: the model makes no embeddings, or the input is invalid, too long or too large, status 400. Or no
                place is free, status 503.
            ParallelError: the workers cannot answer.
        """
        texts = request.texts
        if self._pooling is None:
            raise bad_request("the model makes no embeddings", "model")
        if not 0 < len(texts) <= self._options.max_inputs:
            raise bad_request(
                f"the input has {len(texts)} texts; send 1 to {self._options.max_inputs} (--max-inputs)", "input"
            )
        with self._engine.counted():
            vectors, tokens = await asyncio.to_thread(self._run, texts)
        self._engine.metrics.took(tokens)
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, request.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self._options.name, "usage": usage}

    def _run(self, texts: list[str]) -> tuple[torch.Tensor, int]:
        """Return vectors `[texts, width]`, and the total number of tokens in the texts."""
        assert self._pooling is not None
        pooling = self._pooling
        rows = [self._chat.encoding(pooling.prompt + text) for text in texts]
        return run_rows(
            self._engine,
            self._chat.tokenizer,
            rows,
            self._longest,
            lambda output, mask: pooling(output.last_hidden_state, mask),
        )


def _lower_case(tokenizer: Any) -> None:
    """Make a tokenizer lower-case texts before every other normalization, like sentence-transformers."""
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            "the model lower-cases its texts, which only a fast tokenizer supports; this model has a slow tokenizer"
        )
    backend = tokenizer.backend_tokenizer
    others = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])


def _encoded(vector: torch.Tensor, form: str) -> list[float] | str:
    """Return a vector in the requested encoding: a list of numbers, or base64 of little-endian float32 values."""
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
