"""Makes the models of walks: stock models, and models whose code changes state, draws numbers or reads values."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaForCausalLM

from tests.helpers import walk_settings as settings
from tests.zoo.case import seq2seq_inputs, text_inputs
from tests.zoo.decoders import EXPERTS, decoder, gpt2
from tests.zoo.encoders import DISENTANGLED, encoder
from tests.zoo.seq2seq import bart, t5

STATE = ("steps", "history", "seen", "queue", "plain", "newest", "lock")
"""Names of the attributes that the code of the models below changes."""


class Noting(nn.Module):
    """A norm that changes state of each kind in each forward, and adds this state to its output."""

    def __init__(self, norm: nn.Module, config: Any) -> None:
        super().__init__()
        self.norm, self.config = norm, config
        self.steps, self.history, self.seen, self.queue = 0, list[int](), dict[int, float](), deque[int](maxlen=3)
        self.plain, self.locks, self.lock = torch.ones(3), False, None
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(48), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.total.add_(0.25)
        hidden = self.norm(hidden)
        self.mean = self.mean.lerp(hidden.detach().mean((0, 1)), 0.1)
        self.history.append(self.steps)
        del self.history[:-4]
        self.seen[self.steps % 3] = float(self.total)
        self.queue.append(self.steps)
        self.plain.add_(0.25)
        self.config.note = f"after {self.steps} steps"
        if self.locks:
            self.lock = threading.Lock()
        return hidden + (self.steps + self.total + self.plain.sum()) % 7 + self.mean


class Gate(nn.Module):
    """A module around a layer, with a mean of its own and the statistics of a BatchNorm."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.steps, self.statistics = inner, 0, nn.BatchNorm1d(48)
        self.register_buffer("mean", torch.zeros(48))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.newest = hidden.detach()
        self.mean.lerp_(self.newest.mean((0, 1)), 0.1)
        hidden = self.statistics(hidden.flatten(0, -2)).view_as(hidden)
        return self.inner(hidden) + self.mean * (self.steps % 5)


class Drawing(nn.Module):
    """A norm that draws random numbers, and reads values of a module of the program."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.sign = norm, 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        noise = random.random() + torch.from_numpy(np.random.rand(48)).float()
        return self.norm(hidden) * self.sign * settings.SCALE * settings.TABLE["scale"] + noise * settings.OPTIONS.noise


class Own(LlamaForCausalLM):
    """A model with methods that run lazily."""

    def stream(self, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(3):
            ids = torch.cat([ids, self(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
            yield ids

    async def answer(self, ids: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0)
        return self(input_ids=ids).logits

    async def answers(self, ids: torch.Tensor) -> AsyncIterator[torch.Tensor]:
        for each in self.stream(ids):
            await asyncio.sleep(0)
            yield each

    @contextlib.contextmanager
    def negated(self) -> Iterator[None]:
        before, self.model.norm.sign = self.model.norm.sign, -1.0
        try:
            yield
        finally:
            self.model.norm.sign = before


def noting() -> Any:
    model = decoder("Llama", attention="eager")
    model.model.norm = Noting(model.model.norm, model.config)
    model.model.embed_tokens.max_norm = 1.0
    return model


def gated() -> Any:
    model = decoder("Llama", attention="eager")
    for layer in model.model.layers:
        layer.mlp = Gate(layer.mlp)
    return model


def drawing() -> Any:
    model = decoder("Llama", attention="eager")
    model.__class__, model.model.norm = Own, Drawing(model.model.norm)
    return model


def regression_inputs() -> dict[str, Any]:
    return {**text_inputs(), "labels": torch.tensor([0.5, 1.5])}


def without_dropout(model: nn.Module) -> Any:
    """Return the model without dropout, so that numbers are comparable in training mode too."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)
    return model


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "llama": (lambda: without_dropout(decoder("Llama", attention="eager")), text_inputs),
    "noting": (lambda: without_dropout(noting()), text_inputs),
    "t5": (lambda: without_dropout(t5()), seq2seq_inputs),
    "gated": (lambda: without_dropout(gated()), text_inputs),
    "gpt2": (lambda: without_dropout(gpt2()), text_inputs),
    "drawing": (lambda: without_dropout(drawing()), text_inputs),
    "bert": (lambda: without_dropout(encoder("Bert", attention="eager")), text_inputs),
    "mixtral": (lambda: without_dropout(decoder("Mixtral", attention="eager", width=80, **EXPERTS)), text_inputs),
    "albert": (lambda: without_dropout(encoder("Albert", attention="eager", embedding_size=20)), text_inputs),
    "regression": (
        lambda: without_dropout(encoder("Bert", "ForSequenceClassification", attention="eager", num_labels=1)),
        regression_inputs,  # its forward sets the configuration's problem_type
    ),
    "bart": (lambda: without_dropout(bart()), seq2seq_inputs),
    "deberta": (lambda: without_dropout(encoder("DebertaV2", **DISENTANGLED)), text_inputs),
}
"""Name → function that makes the model, always the same, and its inputs."""

IN_ORDER = ("noting", "gated", "drawing")
"""Names of models whose answers depend on earlier calls."""
