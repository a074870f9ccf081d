"""Answers `/v1/embeddings` with one vector for each text."""

from __future__ import annotations

import base64
from typing import Any

import torch
from tokenizers import normalizers

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.engine import Engine
from parallelformers_ng.serving.forwards import run_texts
from parallelformers_ng.serving.pooling import Pooling
from parallelformers_ng.serving.requests import EmbeddingRequest


class Embeddings:
    """Handler of requests for embeddings.

    Args:
        engine: engine of the model.
        chat: tokenizer of the model. If the pooling lower-cases texts, the constructor changes the tokenizer's
            normalizer.
        pooling: pooling of the model's outputs; None if the model makes no embeddings.

    Raises:
        UnsupportedModelError: the pooling lower-cases texts, but the tokenizer is not a fast tokenizer.
    """

    def __init__(self, engine: Engine, chat: Chat, pooling: Pooling | None) -> None:
        self._engine = engine
        self._chat = chat
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
            ApiError: the model makes no embeddings, or the input is invalid, too long or too large, status 400. Or the
                model name is unknown, status 404. Or no place is free, status 503.
            ParallelError: the workers cannot answer.
        """
        name, pooling = self._engine.models.named(request.model), self._pooling
        if pooling is None:
            raise bad_request("the model makes no embeddings", "model")
        vectors, usage = await run_texts(
            self._engine,
            self._chat.tokenizer,
            request.texts,
            lambda text: self._chat.encoding(pooling.prompt + text),
            self._longest,
            lambda output, mask: pooling(output.last_hidden_state, mask),
        )
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, request.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        return {"object": "list", "data": data, "model": name, "usage": usage}


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
