"""`/v1/embeddings`: one vector for each text, of an encoder."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.serving.chat import Chat
from parallelformers_ng.serving.engine import Engine
from parallelformers_ng.serving.errors import bad_request
from parallelformers_ng.serving.options import ServeOptions
from parallelformers_ng.serving.requests import EmbeddingRequest

_TOKENS_AT_ONCE = 4096  # of one forward, padding included


@dataclass(frozen=True)
class Pooling:
    """How the vectors of tokens become one.

    Attributes:
        mode: "mean" of all tokens, or the vector of the first ("cls") or the last.
        normalized: its length is made 1.
    """

    mode: str = "mean"
    normalized: bool = True

    def __call__(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """One vector a text, `[texts, width]`.

        Args:
            states: of the last layer, `[texts, tokens, width]`.
            mask: 1 where there is a token, `[texts, tokens]`.
        """
        if self.mode == "cls":
            pooled = states[:, 0]
        elif self.mode == "lasttoken":
            pooled = states[torch.arange(len(states)), mask.sum(1) - 1]
        else:
            weights = mask[..., None].to(states.dtype)
            pooled = (states * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(pooled, dim=-1) if self.normalized else pooled


def read_pooling(folder: str) -> Pooling:
    """The pooling that a folder in the form of sentence-transformers asks for; the mean, normalized, where none does.

    Raises:
        UnsupportedModelError: it asks for one that is not here.
    """
    modules = Path(folder) / "modules.json"
    if not modules.is_file():
        return Pooling()
    kinds = {module["type"].rpartition(".")[2]: module["path"] for module in json.loads(modules.read_text())}
    mode = "mean"
    if "Pooling" in kinds:
        said = json.loads((Path(folder) / kinds["Pooling"] / "config.json").read_text())
        chosen = [name for name, value in said.items() if name.startswith("pooling_mode_") and value is True]
        modes = {name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for name in chosen}
        mode = modes.pop() if len(modes) == 1 else str(said.get("pooling_mode", sorted(modes)))
    if mode not in ("mean", "cls", "lasttoken"):
        raise UnsupportedModelError(f"{folder} pools by {mode!r}, and the server by mean, cls or lasttoken")
    return Pooling(mode, "Normalize" in kinds)


class Embeddings:
    """Answers requests for embeddings.

    Args:
        engine: the model.
        chat: its tokenizer.
        options: the limits.
    """

    def __init__(self, engine: Engine, chat: Chat, options: ServeOptions) -> None:
        self._engine = engine
        self._chat = chat
        self._options = options
        self._pooling = read_pooling(options.model)

    async def embed(self, request: EmbeddingRequest) -> dict[str, Any]:
        """`/v1/embeddings`."""
        texts = request.texts
        if self._engine.generates:
            raise bad_request("the model generates text; embeddings are served of encoders", "model")
        if not 0 < len(texts) <= self._options.max_inputs:
            raise bad_request(
                f"the input has {len(texts)} texts, and may have 1 to {self._options.max_inputs}", "input"
            )
        self._engine.admit(1)
        with self._engine.metrics.answering():
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
        rows = [self._chat.ids(text) for text in texts]
        for row in rows:
            self._engine.check_prompt(row)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        found: dict[int, torch.Tensor] = {}
        while order:
            longest = len(rows[order[-1]])
            batch = [order.pop() for _ in range(min(len(order), max(1, _TOKENS_AT_ONCE // longest)))]
            inputs = self._chat.tokenizer.pad(
                {"input_ids": [rows[index] for index in batch]}, padding_side="right", return_tensors="pt"
            )
            states = self._engine.model(**inputs).last_hidden_state
            found.update(zip(batch, self._pooling(states, inputs["attention_mask"]).float(), strict=True))
        return torch.stack([found[index] for index in range(len(rows))]), sum(map(len, rows))


def _written(vector: torch.Tensor, form: str) -> list[float] | str:
    """As a list, or as little-endian floats of 4 bytes in base64."""
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
