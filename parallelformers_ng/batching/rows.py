"""The rows that a rank decodes together. Every rank has the same rows, and is told the same of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

from parallelformers_ng.batching.prepared import Prepared
from parallelformers_ng.errors import BatchingError


@dataclass
class Row:
    """A sequence that grows.

    Attributes:
        number: the caller's name for it.
        call: how its next token is chosen, and when it ends.
        ids: the prompt and the tokens so far, int64 `[1, tokens]`.
        random: state of the generator that it draws from, None where it draws nothing.
        told: how many of its tokens the caller has.
    """

    number: int
    call: Prepared
    random: torch.Tensor | None
    ids: torch.Tensor = field(init=False)
    told: int = field(init=False)
    ended: bool = False

    def __post_init__(self) -> None:
        self.ids = self.call.input_ids
        self.told = self.ids.shape[1]

    def take(self, logits: torch.Tensor) -> None:
        """Choose the next token as transformers' own loop does.

        Args:
            logits: of the newest token, `[1, vocabulary]`.
        """
        scores = self.call.processors(self.ids, logits.to(copy=True, dtype=torch.float32))
        if self.call.config.do_sample:
            assert self.random is not None
            torch.set_rng_state(self.random)
            token = torch.multinomial(scores.softmax(-1), num_samples=1)
            self.random = torch.get_rng_state()
        else:
            token = scores.argmax(-1, keepdim=True)
        self.ids = torch.cat((self.ids, token), -1)
        self.ended = bool(self.call.criteria(self.ids, scores)[0])

    def news(self) -> list[int]:
        """The tokens that the caller has not been told of."""
        new: list[int] = self.ids[0, self.told :].tolist()
        self.told = self.ids.shape[1]
        return new


class Rows:
    """Sequences in one batch, aligned at their newest token, with padding before the first token of the shorter ones.

    ::

        joins:   · · a a a        steps:   · · a a a a        a leaves:   b b b b b b
                 b b b b b                 b b b b b b                    · · · c c c
                                           · · · c c c

    A row joins with the cache of its prompt; either side is padded to the length of the other. Masks and positions are
    each row's own, so its tokens do not depend on its company: `proof.py` sees to it for a type of model.

    Args:
        model: the rank's.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows: list[Row] = []
        self._cache: Cache | None = None
        self._mask = torch.ones(0, 0, dtype=torch.long)

    def join(self, number: int, call: Prepared, random: torch.Tensor | None) -> Row:
        """Take a call of `generate` in: run its prompt, and choose its first token.

        Raises:
            BatchingError: the model keeps a cache that no row can be added to.
        """
        row = Row(number, call, random)
        inputs = self._model.prepare_inputs_for_generation(call.input_ids, is_first_iteration=True, **call.model_kwargs)
        outputs = self._model(**inputs, return_dict=True)
        row.take(outputs.logits[:, -1])
        if not row.ended:
            self._add(row, outputs.past_key_values, call.input_ids.shape[1])
        return row

    def step(self) -> list[Row]:
        """Choose one more token for each row. Returns the rows, also those that ended with it and have left."""
        rows = self._rows
        self._mask = pad(self._mask, (0, 1), value=1)
        inputs = self._model.prepare_inputs_for_generation(
            torch.cat([row.ids[:, -1:] for row in rows]),
            past_key_values=self._cache,
            attention_mask=self._mask,
            position_ids=self._mask.sum(-1, keepdim=True) - 1,
            use_cache=True,
        )
        logits = self._model(**inputs, return_dict=True).logits[:, -1]
        for index, row in enumerate(rows):
            row.take(logits[index : index + 1])
        self.leave([row.number for row in rows if row.ended])
        return rows

    def leave(self, numbers: Collection[int]) -> None:
        """Let rows go, and columns that held nothing but their padding."""
        stay = [index for index, row in enumerate(self._rows) if row.number not in numbers]
        if len(stay) == len(self._rows):
            return
        self._rows = [self._rows[index] for index in stay]
        if not stay:
            self._cache = None
            return
        self._mask = self._mask[stay]
        empty = int(self._mask.any(0).to(torch.uint8).argmax())
        self._mask = self._mask[:, empty:]
        for layer in self._layers(self._cache):
            # Where a window has slid on, a layer holds fewer columns than there are.
            first = max(0, layer.keys.shape[-2] - self._mask.shape[1])
            layer.keys, layer.values = layer.keys[stay, :, first:], layer.values[stay, :, first:]
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = self._mask.shape[1]

    def __len__(self) -> int:
        return len(self._rows)

    def _add(self, row: Row, cache: Cache | None, length: int) -> None:
        layers = self._layers(cache)
        mask = torch.ones(1, length, dtype=torch.long)
        if self._cache is None:
            self._cache, self._mask = cache, mask
        else:
            columns = max(self._mask.shape[1], length)
            self._mask = torch.cat([pad(each, (columns - each.shape[1], 0)) for each in (self._mask, mask)])
            for ours, its in zip(self._layers(self._cache), layers, strict=True):
                ours.keys, ours.values = _joined(ours.keys, its.keys), _joined(ours.values, its.values)
                if hasattr(ours, "cumulative_length"):  # of a window that slides: of all columns, also those it left
                    ours.cumulative_length = columns
        self._rows = [*self._rows, row]

    @staticmethod
    def _layers(cache: Any) -> list[Any]:
        layers = getattr(cache, "layers", None)
        if not layers or not all(isinstance(layer, DynamicLayer) for layer in layers):
            raise BatchingError(f"no row can be added to a {type(cache).__name__} of this kind")
        return layers


def _joined(ours: torch.Tensor, its: torch.Tensor) -> torch.Tensor:
    """Keys or values, `[rows, heads, columns, width]`, aligned at their ends."""
    columns = max(ours.shape[-2], its.shape[-2])
    return torch.cat([pad(each, (0, 0, columns - each.shape[-2], 0)) for each in (ours, its)])
