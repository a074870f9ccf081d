"""Whether calls of a model may be decoded together: each must give what it gives alone. Tried on a small copy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from itertools import chain, starmap
from typing import Any

import torch

from parallelformers_ng.autopolicy.live_edits import LiveEdits
from parallelformers_ng.autopolicy.twin import difference
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.batching.prefixes import Prefixes
from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.prompts import Prompts
from parallelformers_ng.batching.row import BatchRow
from parallelformers_ng.batching.rows import Rows
from parallelformers_ng.errors import UnsupportedModelError

log = logging.getLogger("parallelformers_ng")

PROMPTS = ((3, 9), (5, 6), (3, 12), (7, 5), (12, 8))
"""Calls of the proof, tokens before and after: they join one after another, and leave in another order."""
_PIECE = 5
_TOLERANCE = 1e-3
"""Of the largest score. Equal tokens are not enough, as small mistakes change few of a small random model; they are
more than this, and rounding is less, also of states that models keep in float32 whatever their type."""


_UNKNOWN = "it is not known yet whether the model's calls may share a batch"


class Trial:
    """Finds out, once for each state of its code, whether calls of a model may share a batch.

    Args:
        at_once: the first call waits for it. Else calls run one after another until it is known.
        edits: code that the program changed since the class built the model.

    Attributes:
        is_due: it has begun, or must begin with the next call.
        in_pieces: prompts may run side by side, in pieces, and from where they begin alike; else whole, one by one.
    """

    def __init__(self, at_once: bool, edits: LiveEdits | None = None) -> None:
        self._edits = edits
        self.is_due = self._at_once = at_once
        self._lock = threading.Lock()
        self._has_begun = False
        self.in_pieces = False
        self._why_alone = _UNKNOWN
        self._code = 0

    def why_alone(self, cls: Any, config: Any, code: int = 0) -> str:
        """Say why a call of a model of this class and configuration runs alone; "" if it may share a batch.

        Args:
            code: how often the code that the model runs has changed.
        """
        self.is_due = True
        with self._lock:
            if code != self._code:
                self._code, self._has_begun, self._why_alone, self.in_pieces = code, False, _UNKNOWN, False
            begins, self._has_begun = not self._has_begun, True
            if begins and self._at_once:
                self._try(cls, config, code)  # others wait for the lock
        if begins and not self._at_once:
            threading.Thread(target=self._try, args=(cls, config, code), name="batching proof", daemon=True).start()
        return self._why_alone

    def _try(self, cls: Any, config: Any, code: int) -> None:
        in_pieces = False
        try:
            why, in_pieces = prove(cls, config, self._edits)
        except Exception as error:  # a model's code, run on a small copy of it, may raise anything
            why = f"the proof ended with {type(error).__name__}: {error}"
        if code != self._code:
            return
        self._why_alone, self.in_pieces = why, in_pieces
        if why:
            log.info("calls of %s are decoded one after another: %s", cls.__name__, why)


def prove(cls: Any, config: Any, edits: LiveEdits | None = None) -> tuple[str, bool]:
    """Try it on a small copy of a model of this class and configuration, with the same code.

    Returns:
        Why calls run one after another, "" if they may share a batch; and whether prompts may run in pieces.
    """
    if config.is_encoder_decoder:
        return "it has an encoder", False
    try:
        twin = make_twin(cls, config, edits=edits)
    except UnsupportedModelError as error:
        return str(error), False
    if not why_alone(twin.model, in_pieces=True):
        return "", True
    return why_alone(twin.model, in_pieces=False), False


def why_alone(model: Any, in_pieces: bool, lengths: Sequence[tuple[int, int]] = PROMPTS) -> str:
    """Return why calls of such a model run one after another, "" if they may share a batch.

    Args:
        model: a small random model on CPU; see `autopolicy.twin_making`.
        in_pieces: see `Trial`.
        lengths: tokens of each call, before and after.
    """
    model.set_experts_implementation("eager")  # as on the ranks; other kernels take not all widths of a small copy
    words = model.config.get_text_config().vocab_size
    numbers = torch.Generator().manual_seed(1)
    calls: list[dict[str, Any]] = [
        {
            "input_ids": torch.randint(0, words, (1, before), generator=numbers),
            "max_new_tokens": after,
            "min_new_tokens": after,
            "do_sample": False,
            "return_dict_in_generate": False,
        }
        for before, after in lengths
    ]
    calls[-1]["input_ids"][:, :4] = calls[1]["input_ids"][:, :4]
    for call in calls:
        if call["input_ids"][0, -1] == model.generation_config.pad_token_id:
            call["input_ids"][0, -1] = (call["input_ids"][0, -1] + 1) % words  # such a prompt shares no batch
    try:
        with torch.inference_mode():
            alone, scores = zip(*(_watched(call) for call in calls), strict=True)
            ids = [model.generate(**call) for call in alone]
            shared, others = zip(*(_watched(call) for call in calls), strict=True)
            together = _together(model, list(shared), in_pieces)
    except Exception as error:  # whatever a model of a kind of its own raises
        return f"{type(error).__name__}: {error}"
    different = sum(not torch.equal(*pair) for pair in zip(ids, together, strict=True))
    if different:
        return f"{different} of {len(calls)} sequences have other tokens than alone"
    worst = max(starmap(difference, zip(chain(*others), chain(*scores), strict=True)), default=0.0)
    return f"scores differ from those of calls alone, by {worst:.0e} of the largest" if worst > _TOLERANCE else ""


def _watched(call: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return a call, and the scores that its tokens are chosen by, once it has run."""
    seen: list[torch.Tensor] = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores)
        return scores

    return {**call, "logits_processor": [watch]}, seen


def _together(model: Any, calls: list[dict[str, Any]], in_pieces: bool) -> list[torch.Tensor]:
    prefixes = Prefixes(100 if in_pieces else 0, least=2)
    rows, prompts, met = Rows(model, None, prefixes), Prompts(model, prefixes), list[BatchRow]()
    for number, call in enumerate(calls):
        met.append(BatchRow(number, prepare(model, call)))
        prompts.add(met[-1])
        if not number:
            continue  # the first two run side by side, the last in pieces, and begins like the second
        while len(prompts):
            if ran := prompts.run((_PIECE if len(rows) else 2 * _PIECE) if in_pieces else 0):
                rows.join(ran.rows, ran.logits, ran.cache, ran.mask)
            if len(rows):
                rows.step()
    while len(rows):
        rows.step()
    return [row.ids for row in met]
