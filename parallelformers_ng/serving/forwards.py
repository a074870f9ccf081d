"""Answers `/v1/embeddings`, `/v1/score` and `/v1/rerank` with forward passes over texts of similar length."""

from __future__ import annotations

import asyncio
import base64
import inspect
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tokenizers import normalizers

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.engine import Engine
from parallelformers_ng.serving.requests import EmbeddingRequest
from parallelformers_ng.serving.score_requests import RerankRequest, ScoreRequest
from parallelformers_ng.serving.sentence_modules import Pooling

_TOKENS_AT_ONCE = 4096  # maximum number of tokens in one forward pass, padding included
_ACTIVATIONS = {"Identity": torch.nn.Identity, "Sigmoid": torch.nn.Sigmoid, "Tanh": torch.nn.Tanh}
_Text = TypeVar("_Text", str, tuple[str, str])


def activation_of(config: Any) -> torch.nn.Module:
    """Return the function from a classifier's logit to a score, as in the CrossEncoder of sentence-transformers.

    The configuration names the function; the default is the sigmoid.

    Args:
        config: configuration of the model.

    Raises:
        UnsupportedModelError: the configuration names an unsupported function.
    """
    settings = getattr(config, "sentence_transformers", None) or {}
    path = settings.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    name = path.rpartition(".")[2]
    if name not in _ACTIVATIONS or not path.startswith(("torch.", name)):
        raise UnsupportedModelError(
            f"the model has the activation function {path}; the server supports {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]()


class Forwards:
    """Handler of requests for embeddings of texts and for scores of pairs of texts.

    Args:
        engine: engine of the model.
        chat: tokenizer of the model. If the pooling lower-cases texts, the constructor changes the tokenizer's
            normalizer.
        pooling: pooling of the model's outputs; None if the model makes no embeddings.
        activation: function from a logit to a score; None if the model is not a classifier.

    Raises:
        UnsupportedModelError: the pooling lower-cases texts, but the tokenizer is not a fast tokenizer.
    """

    def __init__(self, engine: Engine, chat: Chat, pooling: Pooling | None, activation: torch.nn.Module | None) -> None:
        self._engine = engine
        self._chat = chat
        self._pooling = pooling
        self._activation = activation
        self._longest = min(engine.longest, chat.tokenizer.model_max_length)
        if pooling is not None and pooling.max_tokens:
            self._longest = min(self._longest, pooling.max_tokens)
        if pooling is not None and pooling.lower_case:
            if not chat.tokenizer.is_fast:
                raise UnsupportedModelError(
                    "the model lower-cases its texts, which only a fast tokenizer supports; this model has a slow"
                    " tokenizer"
                )
            # Like sentence-transformers, before every other normalization.
            backend = chat.tokenizer.backend_tokenizer
            others = [] if backend.normalizer is None else [backend.normalizer]
            backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])

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
        vectors, usage = await self._run(
            request.texts,
            lambda text: self._chat.encoding(pooling.prompt + text),
            lambda output, mask: pooling(output.last_hidden_state, mask),
        )
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, request.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        return {"object": "list", "data": data, "model": name, "usage": usage}

    async def score(self, request: ScoreRequest) -> dict[str, Any]:
        """Answer a request to `/v1/score`.

        Returns:
            JSON object in vLLM's format, with one score for each pair of texts.

        Raises:
            ApiError: the model is not a classifier, or the texts are invalid, too many or too long, status 400. Or the
                model name is unknown, status 404. Or no place is free, status 503.
            ParallelError: the workers cannot answer.
        """
        name = self._engine.models.named(request.model)
        scores, usage = await self._scores(request.pairs, request.use_activation)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        common = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        return {**common, "model": name, "data": data, "usage": usage}

    async def rerank(self, request: RerankRequest) -> dict[str, Any]:
        """Answer a request to `/v1/rerank`.

        Returns:
            JSON object in vLLM's format, with the documents sorted by their score, best first.

        Raises:
            ApiError, ParallelError: see `score`.
        """
        name, texts = self._engine.models.named(request.model), request.texts
        scores, usage = await self._scores([(request.query, text) for text in texts], request.use_activation)
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": score}
            | ({"document": {"text": texts[index]}} if request.return_documents else {})
            for index, score in enumerate(scores)
        ]
        results.sort(key=lambda each: -each["relevance_score"])
        top = request.top_n or len(results)
        return {"id": f"rerank-{secrets.token_hex(12)}", "model": name, "results": results[:top], "usage": usage}

    async def _scores(self, pairs: list[tuple[str, str]], activates: bool) -> tuple[list[float], dict[str, int]]:
        if self._activation is None:
            raise bad_request("the model is not a classifier of text pairs and cannot score", "model")
        logits, usage = await self._run(
            pairs,
            lambda pair: self._chat.encoding(pair[0], second=pair[1]),
            lambda output, _: output.logits[:, 0].float(),
        )
        return (self._activation(logits) if activates else logits).tolist(), usage

    async def _run(
        self,
        texts: Sequence[_Text],
        encode: Callable[[_Text], Mapping[str, Any]],
        read: Callable[[Any, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, int]]:
        """Run the model over texts or pairs of texts, and return one result row for each, and the field `usage`.

        Args:
            texts: texts or pairs of texts.
            encode: function that returns the tokenizer's output for one text, without padding.
            read: function of the model's output and the attention mask, int64 `[batch, tokens]`; returns the result
                rows `[batch, …]`, of any data type.

        Raises:
            ApiError: the texts are too many, or none. Or a text is empty, too long, or has an unknown token, status
                400. Or no place is free, status 503.
            ParallelError: the workers cannot answer.
        """
        most = self._engine.options.max_inputs
        if not 0 < len(texts) <= most:
            raise bad_request(
                f"the request has {len(texts)} texts or pairs of texts; send 1 to {most} (--max-inputs)", "input"
            )
        with self._engine.admitted(1):
            results, tokens = await asyncio.to_thread(lambda: self._rows([encode(text) for text in texts], read))
        self._engine.metrics.took(tokens)
        return results, {"prompt_tokens": tokens, "total_tokens": tokens}

    def _rows(
        self, rows: Sequence[Mapping[str, Any]], read: Callable[[Any, torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, int]:
        """Return the result rows of encoded texts, and the total number of tokens without padding.

        A forward pass has at most 4096 tokens including padding, or one longer text. A model without a pad token runs
        one text at a time.
        """
        model = self._engine.model
        inputs = inspect.signature(model.forward).parameters
        sizes = [len(row["input_ids"]) for row in rows]
        for row in rows:
            self._engine.check_prompt(row["input_ids"], self._longest)
        order = sorted(range(len(rows)), key=lambda index: sizes[index])
        outputs: dict[int, torch.Tensor] = {}
        # A decoder with a classification head finds the last token of each row by the pad token id.
        most_rows = len(rows) if model.config.get_text_config().pad_token_id is not None else 1
        more = {"use_cache": False} if "use_cache" in inputs else {}
        while order:
            count = min(len(order), max(1, _TOKENS_AT_ONCE // sizes[order[-1]]), most_rows)
            batch = [order.pop() for _ in range(count)]
            padded = self._chat.tokenizer.pad(
                [{name: rows[index][name] for name in rows[index] if name in inputs} for index in batch],
                padding_side="right",
                return_tensors="pt",
            )
            with torch.no_grad():
                answers = read(model(**padded, **more), padded["attention_mask"])
            outputs.update(zip(batch, answers, strict=True))
        return torch.stack([outputs[index] for index in range(len(rows))]), sum(sizes)


def _encoded(vector: torch.Tensor, form: str) -> list[float] | str:
    """Return a vector in the requested encoding: a list of numbers, or base64 of little-endian float32 values."""
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
