"""Answers `/v1/embeddings`, `/v1/score` and `/v1/rerank` with forward passes over texts of similar length."""

from __future__ import annotations

import asyncio
import base64
import inspect
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import normalizers

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.engine import Engine
from parallelformers_ng.serving.requests import EmbeddingRequest
from parallelformers_ng.serving.score_requests import RerankRequest, ScoreRequest
from parallelformers_ng.serving.sentence_modules import Pooling

_TOKENS_AT_ONCE = 4096  # longer lists of texts run in several forward passes
_ACTIVATIONS = {"Identity": torch.nn.Identity, "Sigmoid": torch.nn.Sigmoid, "Tanh": torch.nn.Tanh}
_Read = Callable[[Any, torch.Tensor], torch.Tensor]
"""Function of the model's output and the attention mask `[batch, tokens]` that returns the result rows `[batch, …]`."""


def activation_of(config: Any) -> torch.nn.Module:
    """Return the activation function that sentence-transformers' `CrossEncoder` would apply to a classifier's logit."""
    settings = getattr(config, "sentence_transformers", None) or {}
    path = settings.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    name = path.rpartition(".")[2]
    if name not in _ACTIVATIONS or not path.startswith(("torch.", name)):
        message = f"the model has the activation function {path}; the server supports {', '.join(_ACTIVATIONS)}"
        raise UnsupportedModelError(message)
    return _ACTIVATIONS[name]()


class Forwards:
    """Handler of requests for embeddings of texts, and for scores of pairs of texts if the model is a classifier."""

    def __init__(self, engine: Engine, chat: Chat, pooling: Pooling | None, activation: torch.nn.Module | None) -> None:
        self._engine = engine
        self._chat = chat
        self._pooling = pooling
        self._activation = activation
        limits = (engine.longest, chat.tokenizer.model_max_length, pooling and pooling.max_tokens)
        self._longest: int = min(limit for limit in limits if limit)
        if pooling is not None and pooling.lower_case:
            if not chat.tokenizer.is_fast:
                raise UnsupportedModelError("the model lower-cases its texts, which needs a fast tokenizer")
            backend = chat.tokenizer.backend_tokenizer
            others = [] if backend.normalizer is None else [backend.normalizer]
            # sentence-transformers lower-cases a text before the tokenizer's other normalizers run.
            backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])

    async def embed(self, request: EmbeddingRequest) -> dict[str, Any]:
        """Return one embedding vector for each text."""
        name, pooling = self._engine.named(request.model), self._pooling
        if pooling is None:
            raise bad_request("the model makes no embeddings", "model")
        texts = [(pooling.prompt + text, None) for text in request.texts]
        vectors, usage = await self._run(texts, lambda output, mask: pooling(output.last_hidden_state, mask))
        embeddings = vectors.tolist()
        if request.encoding_format == "base64":
            embeddings = [base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode() for vector in vectors]
        data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(embeddings)]
        return {"object": "list", "data": data, "model": name, "usage": usage}

    async def score(self, request: ScoreRequest) -> dict[str, Any]:
        """Return a score for each pair of texts, such as their similarity."""
        name = self._engine.named(request.model)
        scores, usage = await self._scores(request.pairs, request.use_activation)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        common = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        return {**common, "model": name, "data": data, "usage": usage}

    async def rerank(self, request: RerankRequest) -> dict[str, Any]:
        """Return documents sorted by their score against a query, best first."""
        name, texts = self._engine.named(request.model), request.texts
        scores, usage = await self._scores([(request.query, text) for text in texts], request.use_activation)
        ranked = sorted(enumerate(scores), key=lambda each: -each[1])[: request.top_n or None]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in ranked]
        if request.return_documents:
            results = [{**each, "document": {"text": texts[each["index"]]}} for each in results]
        return {"id": f"rerank-{secrets.token_hex(12)}", "model": name, "results": results, "usage": usage}

    async def _scores(self, pairs: list[tuple[str, str]], activates: bool) -> tuple[list[float], dict[str, int]]:
        if self._activation is None:
            raise bad_request("the model is not a classifier of text pairs and cannot score", "model")
        logits, usage = await self._run(pairs, lambda output, _: output.logits[:, 0].float())
        return (self._activation(logits) if activates else logits).tolist(), usage

    async def _run(self, texts: Sequence[tuple[str, str | None]], read: _Read) -> tuple[torch.Tensor, dict[str, int]]:
        """Apply `read` to the model's outputs; return one row per text or pair of texts, and the field `usage`."""
        most = self._engine.options.max_inputs
        if not 0 < len(texts) <= most:
            message = f"the request has {len(texts)} texts or pairs of texts; send 1 to {most} (--max-inputs)"
            raise bad_request(message, "input")
        with self._engine.admitted(1):
            results, tokens = await asyncio.to_thread(self._rows, texts, read)
        self._engine.metrics.took(tokens)
        return results, {"prompt_tokens": tokens, "total_tokens": tokens}

    def _rows(self, texts: Sequence[tuple[str, str | None]], read: _Read) -> tuple[torch.Tensor, int]:
        """Run batches of texts of similar length; return one row per text or pair, and the number of tokens."""
        model = self._engine.model
        inputs = inspect.signature(model.forward).parameters
        encodings = [self._chat.encoding(text, second=second) for text, second in texts]
        rows = [{name: encoding[name] for name in encoding if name in inputs} for encoding in encodings]
        sizes = [len(row["input_ids"]) for row in rows]
        for row in rows:
            self._engine.check_prompt(row["input_ids"], self._longest)
        order = sorted(range(len(rows)), key=lambda index: sizes[index])
        outputs: dict[int, torch.Tensor] = {}
        # transformers finds the last token of a padded row by the pad token id, so without this id a batch has one row.
        max_rows = len(rows) if model.config.get_text_config().pad_token_id is not None else 1
        more = {"use_cache": False} if "use_cache" in inputs else {}
        while order:
            count = min(len(order), max(1, _TOKENS_AT_ONCE // sizes[order[-1]]), max_rows)
            batch = [order.pop() for _ in range(count)]
            features = [rows[index] for index in batch]
            padded = self._chat.tokenizer.pad(features, padding_side="right", return_tensors="pt")
            with torch.no_grad():
                answers = read(model(**padded, **more), padded["attention_mask"])
            outputs.update(zip(batch, answers, strict=True))
        return torch.stack([outputs[index] for index in range(len(rows))]), sum(sizes)
