"""Answers `/v1/score` and `/v1/rerank` with the scores of text pairs, from a classifier with one label."""

from __future__ import annotations

import secrets
import time
from typing import Any

import torch

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.engine import Engine
from parallelformers_ng.serving.forwards import run_texts
from parallelformers_ng.serving.score_requests import RerankRequest, ScoreRequest

_ACTIVATIONS = {"Identity": torch.nn.Identity, "Sigmoid": torch.nn.Sigmoid, "Tanh": torch.nn.Tanh}


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


class Scores:
    """Handler of requests for scores.

    Args:
        engine: engine of the model.
        chat: tokenizer of the model.
        activation: function from a logit to a score; None if the model is not a classifier.
    """

    def __init__(self, engine: Engine, chat: Chat, activation: torch.nn.Module | None) -> None:
        self._engine = engine
        self._chat = chat
        self._activation = activation
        self._longest = min(engine.longest, chat.tokenizer.model_max_length)

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
        logits, usage = await run_texts(
            self._engine,
            self._chat.tokenizer,
            pairs,
            lambda pair: self._chat.encoding(pair[0], second=pair[1]),
            self._longest,
            lambda output, _: output.logits[:, 0].float(),
        )
        scores = self._activation(logits) if activates else logits
        return scores.tolist(), usage
