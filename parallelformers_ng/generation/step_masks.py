"""Decides once per `generate` whether the attention mask hides a token, so that decode steps do not read the mask.

If a mask hides no token, transformers computes without a mask. transformers reads the mask from the device at every
step to find out, and the host waits for the device. But a mask never hides a generated token, so the mask of the prompt
decides for all steps. A step gets no mask if the prompt's mask hides no token, and gets the mask otherwise.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling
from transformers import masking_utils

_NAMES = ("attention_mask", "decoder_attention_mask")
_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
_QUESTIONS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


def answer_for_steps() -> None:
    """Patch transformers: decode steps inside `known_masks` do not read their attention mask from the device."""
    for name in _QUESTIONS:
        setattr(masking_utils, name, _answered(getattr(masking_utils, name)))


@contextlib.contextmanager
def known_masks(models: Sequence[Any]) -> Iterator[None]:
    """Make `generate` of these models read each attention mask only once, and omit masks that hide no token."""
    changed = [(model, {name: vars(model)[name] for name in _METHODS if name in vars(model)}) for model in models]
    for model in models:
        loop = _Loop()
        _loops.append(loop)
        model.prepare_inputs_for_generation = loop.prepared(model.prepare_inputs_for_generation)
        model._update_model_kwargs_for_generation = loop.lengthened(model._update_model_kwargs_for_generation)
    try:
        yield
    finally:
        _loops.clear()
        for model, before in changed:
            for name in _METHODS:
                delattr(model, name)
            vars(model).update(before)


class _Loop:
    """The attention masks of one model's `generate`, and whether each mask hides a token.

    A mask is recognized by object identity, so masks that other code makes are not changed.
    """

    def __init__(self) -> None:
        self.in_step = False
        self._known: dict[str, tuple[torch.Tensor, bool]] = {}

    def prepared(self, prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Wrap `prepare_inputs_for_generation`: note, for the prompt, masks that hide no token; omit them in steps."""

        @functools.wraps(prepare)
        def prepare_known(*args: Any, **kwargs: Any) -> dict[str, Any]:
            masks = {name: kwargs[name] for name in _NAMES if getattr(kwargs.get(name), "ndim", 0) == 2}
            self.in_step = all(self._knows(name, mask) for name, mask in masks.items())
            inputs = prepare(*args, **kwargs)
            for name, mask in masks.items():
                if not self._knows(name, mask):
                    self._known[name] = mask, bool(mask.all())
                elif self._known[name][1] and inputs.get(name) is mask:
                    inputs[name] = None
            return inputs

        return prepare_known

    def lengthened(self, update: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Wrap `_update_model_kwargs_for_generation`: a longer mask hides a token if the mask before it did."""

        @functools.wraps(update)
        def update_known(outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
            known = [name for name in _NAMES if self._knows(name, model_kwargs.get(name))]
            updated = update(outputs, model_kwargs, *args, **kwargs)
            for name in known:
                self._known[name] = updated[name], self._known[name][1]
            return updated

        return update_known

    def _knows(self, name: str, mask: Any) -> bool:
        return name in self._known and self._known[name][0] is mask


# One `_Loop` for each model of the current request.
_loops: list[_Loop] = []


def _answered(question: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap a function of transformers that reads a mask to find out whether the mask can be omitted.

    In a decode step, the wrapper returns False without reading the mask.
    """

    @functools.wraps(question)
    def answer(padding_mask: torch.Tensor | None, *args: Any) -> bool:
        if not is_compiling() and padding_mask is not None and any(loop.in_step for loop in _loops):
            return False
        return question(padding_mask, *args)

    return answer
