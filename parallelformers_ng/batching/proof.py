"""Whether calls of a model may be decoded together: each must give what it gives alone. Tried on a small copy."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch

from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.batching.prefixes import Prefixes
from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.prompts import Prompts
from parallelformers_ng.batching.row import Row
from parallelformers_ng.batching.rows import Rows
from parallelformers_ng.errors import UnsupportedModelError

log = logging.getLogger("parallelformers_ng")

PROMPTS = ((3, 9), (5, 6), (3, 12), (7, 5), (12, 8))
"""Calls of the proof, tokens before and after: they join one after another, and leave in another order."""
_PIECE = 5


class Trial:
    """Finds out, once, whether calls of a model may share a batch.

    Args:
        at_once: the first call waits for it. Else calls run one after another until it is known.

    Attributes:
        is_due: it has begun, or must begin with the next call.
        in_pieces: prompts may run side by side, in pieces, and from where they begin alike; else whole, one by one.
    """

    def __init__(self, at_once: bool) -> None:
        self.is_due = self._at_once = at_once
        self._lock = threading.Lock()
        self._has_begun = False
        self.in_pieces = False
        self._why_alone = "it is not known yet whether the model's calls may share a batch"

    def why_alone(self, cls: Any, config: Any) -> str:
        """Why a call of a model of this class and configuration runs alone, "" where it may share a batch."""
        self.is_due = True
        with self._lock:
            begins, self._has_begun = not self._has_begun, True
            if begins and self._at_once:
                self._try(cls, config)  # others wait for the lock
        if begins and not self._at_once:
            threading.Thread(target=self._try, args=(cls, config), name="batching proof", daemon=True).start()
        return self._why_alone

    def _try(self, cls: Any, config: Any) -> None:
        self._why_alone, self.in_pieces = prove(cls, config)
        if self._why_alone:
            log.info("calls of %s are decoded one after another: %s", cls.__name__, self._why_alone)


def prove(cls: Any, config: Any) -> tuple[str, bool]:
    """Try it on a small copy of a model of this class and configuration.

    Returns:
        Why calls run one after another, "" where they may share a batch; and whether prompts may run in pieces.
    """
    if config.is_encoder_decoder:
        return "it has an encoder", False
    try:
        twin = make_twin(cls, config)
    except UnsupportedModelError as error:
        return str(error), False
    if not why_alone(twin.model, in_pieces=True):
        return "", True
    return why_alone(twin.model, in_pieces=False), False


def why_alone(model: Any, in_pieces: bool) -> str:
    """Why calls of such a model run one after another, "" where they may share a batch.

    Args:
        model: a small random model on CPU; see `autopolicy.twin_making`.
        in_pieces: see `Trial`.
    """
    words = model.config.get_text_config().vocab_size
    numbers = torch.Generator().manual_seed(1)
    calls: list[dict[str, Any]] = [
        {
            "input_ids": torch.randint(0, words, (1, before), generator=numbers),
            "max_new_tokens": after,
            "min_new_tokens": after,
            "do_sample": False,
        }
        for before, after in PROMPTS
    ]
    calls[-1]["input_ids"][:, :4] = calls[1]["input_ids"][:, :4]
    try:
        with torch.inference_mode():
            alone = [model.generate(**call) for call in calls]
            together = _together(model, calls, in_pieces)
    except Exception as error:  # whatever a model of a kind of its own raises
        return f"{type(error).__name__}: {error}"
    different = sum(not torch.equal(*pair) for pair in zip(alone, together, strict=True))
    return f"{different} of {len(calls)} sequences have other tokens than alone" if different else ""


def _together(model: Any, calls: list[dict[str, Any]], in_pieces: bool) -> list[torch.Tensor]:
    prefixes = Prefixes(100 if in_pieces else 0, least=2)
    rows, prompts, met = Rows(model, None, prefixes), Prompts(model, prefixes), list[Row]()
    for number, call in enumerate(calls):
        met.append(Row(number, prepare(model, call)))
        prompts.add(met[-1])
        if not number:
            continue  # the first two run side by side, the last in pieces, and begins like the second
        while len(prompts):
            if ran := prompts.run(_PIECE if in_pieces else 0):
                rows.join(ran.rows, ran.logits, ran.cache, ran.mask)
            if len(rows):
                rows.step()
    while len(rows):
        rows.step()
    return [row.ids for row in met]
