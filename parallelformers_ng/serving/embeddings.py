"""`/v1/embeddings`: one vector for each text, of an encoder."""

from __future__ import annotations

import asyncio
import base64
import inspect
from typing import Any

import torch
from tokenizers import normalizers

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.engine import Engine
from parallelformers_ng.serving.errors import bad_request
from parallelformers_ng.serving.options import ServeOptions
from parallelformers_ng.serving.pooling import Pooling
from parallelformers_ng.serving.requests import EmbeddingRequest

_TOKENS_AT_ONCE = 4096  # of one forward, padding included


class Embeddings:
    """Answers requests for embeddings.

    Args:
        engine: the model.
        chat: its tokenizer.
        options: the limits.
        pooling: pooling that the model asks for.
    """

    def __init__(self, engine: Engine, chat: Chat, options: ServeOptions, pooling: Pooling) -> None:
        self._engine = engine
        self._chat = chat
        self._options = options
        self._pooling = pooling
        self._inputs = inspect.signature(engine.model.forward).parameters if not engine.generates else ()
        self._longest = min(engine.longest, pooling.max_tokens or engine.longest, chat.tokenizer.model_max_length)
        if pooling.lower_case:
            _lower_case(chat.tokenizer)

    async def embed(self, request: EmbeddingRequest) -> dict[str, Any]:
        """`/v1/embeddings`."""
        texts = request.texts
        if self._engine.generates:
            raise bad_request("the model generates text; embeddings are served of encoders", "model")
        if not 0 < len(texts) <= self._options.max_inputs:
            raise bad_request(
                f"the input has {len(texts)} texts, and may have 1 to {self._options.max_inputs}", "input"
            )
        with self._engine.counted():
            vectors, tokens = await asyncio.to_thread(self._run, texts)
        self._engine.metrics.took(tokens)
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, request.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self._options.name, "usage": usage}

    def _run(self, texts: list[str]) -> tuple[torch.Tensor, int]:
        """Vectors `[texts, width]`, and how many tokens the texts have."""
        rows = [self._chat.encoding(self._pooling.prompt + text) for text in texts]
        sizes = [len(row["input_ids"]) for row in rows]
        for row in rows:
            self._engine.check_prompt(row["input_ids"], self._longest)
        order = sorted(range(len(rows)), key=lambda index: sizes[index])
        found: dict[int, torch.Tensor] = {}
        while order:
            longest = sizes[order[-1]]
            batch = [order.pop() for _ in range(min(len(order), max(1, _TOKENS_AT_ONCE // longest)))]
            padded = self._chat.tokenizer.pad(
                [{name: rows[index][name] for name in rows[index] if name in self._inputs} for index in batch],
                padding_side="right",
                return_tensors="pt",
            )
            states = self._engine.model(**padded).last_hidden_state
            found.update(zip(batch, self._pooling(states, padded["attention_mask"]), strict=True))
        return torch.stack([found[index] for index in range(len(rows))]), sum(sizes)


def _lower_case(tokenizer: Any) -> None:
    """Have a tokenizer lower-case texts before anything else, as sentence-transformers does."""
    if not tokenizer.is_fast:
        raise UnsupportedModelError("the model lower-cases its texts, for which its tokenizer must be a fast one")
    backend = tokenizer.backend_tokenizer
    others = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])


def _written(vector: torch.Tensor, form: str) -> list[float] | str:
    """As a list, or as little-endian floats of 4 bytes in base64."""
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
