"""Checks on a small copy of a model whether each call gets the same tokens in a batch as alone."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from itertools import chain, starmap
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from parallelformers_ng.autopolicy.live_edits import LiveEdits
from parallelformers_ng.autopolicy.twin import difference
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.batching.prefix_cache import PrefixCache
from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.prompts import Prompts, is_causal
from parallelformers_ng.batching.row import BatchRow
from parallelformers_ng.batching.rows import Rows
from parallelformers_ng.errors import DeadlineExpiredError, UnsupportedModelError

log = logging.getLogger("parallelformers_ng")

PROMPTS = ((3, 9), (5, 6), (3, 12), (7, 5), (12, 8))
"""Prompt tokens and new tokens of each call of the proof. The calls leave the batch in another order than they join."""
_CHUNK = 5
_TOLERANCE = 1e-3
"""Largest score difference that the proof accepts, relative to the largest score.

Equal tokens prove too little, because a small error in the scores changes few tokens of a small random model. Errors in
batching exceed this value; rounding, also of float32 states, stays below."""


_UNKNOWN = "the proof has not finished, so the model's calls may not share a batch yet"


class Trial:
    """The batch proof of a model, run again after each change of the model's code.

    Args:
        at_once: whether the first call waits for the result. If not, calls run one after another until the proof ends.
        edits: methods and modules that the user's program replaced after the model was built.

    Attributes:
        is_due: whether the proof has begun or must begin with the next call.
        in_chunks: whether prompts may share passes, run in chunks, and use the prefix cache. If not, each prompt runs
            whole and alone.
    """

    def __init__(self, at_once: bool, edits: LiveEdits | None = None) -> None:
        self._edits = edits
        self.is_due = self._at_once = at_once
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.in_chunks = False
        self._why_alone = _UNKNOWN
        self._code = 0

    def why_alone(self, cls: Any, config: Any, code: int = 0, end: float = math.inf) -> str:
        """Return why calls of a model must run alone; "" if calls may share a batch.

        `code` is the number of changes of the model's code. The first call, and the first call with another `code`,
        starts the proof in a new thread. If the trial was made with `at_once`, all calls wait for the proof, until the
        deadline `end`.
        """
        self.is_due = True
        with self._lock:
            if code != self._code or self._thread is None:
                self._code, self._why_alone, self.in_chunks = code, _UNKNOWN, False
                # No daemon: the process would abort if Python ended the thread while it runs torch.
                self._thread = threading.Thread(target=self._try, args=(cls, config, code), name="batching proof")
                self._thread.start()
            thread = self._thread
        if self._at_once:
            thread.join(min(max(end - time.monotonic(), 0), threading.TIMEOUT_MAX))
            if thread.is_alive():
                raise DeadlineExpiredError(
                    "'generate' was not sent: its deadline passed while the model was tested for batching, which later"
                    " calls need not wait for"
                )
        return self._why_alone

    def _try(self, cls: Any, config: Any, code: int) -> None:
        in_chunks = False
        try:
            why, in_chunks = prove(cls, config, self._edits)
        except Exception as error:  # the model's own code may raise any exception
            why = f"the proof ended with {type(error).__name__}: {error}"
        if code != self._code:
            return
        self._why_alone, self.in_chunks = why, in_chunks
        if why:
            log.info("calls of %s are decoded one after another: %s", cls.__name__, why)


def prove(cls: Any, config: Any, edits: LiveEdits | None = None) -> tuple[str, bool]:
    """Check on a small copy of a model whether its calls may share a batch. Return the reason against it, or ""; and
    whether prompts may run in chunks."""
    if config.is_encoder_decoder:
        return "it has an encoder", False
    try:
        twin = make_twin(cls, config, edits=edits)
    except UnsupportedModelError as error:
        return str(error), False
    if not why_alone(twin.model, in_chunks=True):
        return "", True
    return why_alone(twin.model, in_chunks=False), False


def why_alone(model: Any, in_chunks: bool, lengths: Sequence[tuple[int, int]] = PROMPTS) -> str:
    """Return why calls of a small random model may not share a batch; "" if they may. The function sets the model's
    experts implementation to "eager".

    `lengths` are the prompt tokens and new tokens of each call.
    """
    if in_chunks and not is_causal(model):
        return "tokens see later tokens of a prompt"  # the ranks run such prompts whole, so a trial would prove nothing
    model.set_experts_implementation("eager")  # as on the ranks; other kernels need wider layers than a small copy has
    vocab_size = model.config.get_text_config().vocab_size
    numbers = torch.Generator().manual_seed(1)
    calls: list[dict[str, Any]] = [
        {
            "input_ids": torch.randint(0, vocab_size, (1, before), generator=numbers),
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
            # Replace a pad token at the end: `shared_call` refuses such prompts.
            call["input_ids"][0, -1] = (call["input_ids"][0, -1] + 1) % vocab_size
    try:
        with torch.inference_mode():
            alone, scores = zip(*(_watched(call) for call in calls), strict=True)
            with _Choices() as choices:
                ids = [model.generate(**call) for call in alone]
            if choices.between_equals:
                return "it chooses between tokens with equal scores by their places, which padding changes"
            shared, batch_scores = zip(*(_watched(call) for call in calls), strict=True)
            together = _together(model, list(shared), in_chunks)
    except Exception as error:  # the model's own code may raise any exception
        return f"{type(error).__name__}: {error}"
    different = sum(not torch.equal(*pair) for pair in zip(ids, together, strict=True))
    if different:
        return f"{different} of {len(calls)} sequences have other tokens in a batch than alone"
    worst = max(starmap(difference, zip(chain(*batch_scores), chain(*scores), strict=True)), default=0.0)
    return f"scores differ in a batch and alone, by {worst:.0e} of the largest score" if worst > _TOLERANCE else ""


class _Choices(TorchFunctionMode):
    """Detects calls of `topk` that choose between equal scores.

    Attributes:
        between_equals: whether a score that was left out equals a score that was chosen. This happens if scores end in
            ReLU, which gives many zeros. Padding changes the choice, but may not change the few tokens of the proof.
    """

    between_equals = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.topk, torch.Tensor.topk) and (scores := args[0]).is_floating_point():
            dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", -1)
            least = result.values.amin(dim, keepdim=True)
            equals = (scores == least).sum(dim) > (result.values == least).sum(dim)
            self.between_equals |= bool((equals & (least > torch.finfo(scores.dtype).min / 2).squeeze(dim)).any())
        return result


def _watched(call: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    seen: list[torch.Tensor] = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not threading.main_thread().is_alive():  # stop, because Python's exit waits for this thread
            raise RuntimeError("the program has ended")
        seen.append(scores)
        return scores

    return {**call, "logits_processor": [watch]}, seen


def _together(model: Any, calls: list[dict[str, Any]], in_chunks: bool) -> list[torch.Tensor]:
    """Run calls in one batch; return prompt and new tokens of each."""
    prefixes = PrefixCache(100 if in_chunks else 0, min_tokens=2)
    rows, prompts, batch_rows = Rows(model, None, prefixes), Prompts(model, prefixes), list[BatchRow]()
    for number, call in enumerate(calls):
        batch_rows.append(BatchRow(number, prepare(model, call)))
        prompts.add(batch_rows[-1])
        if not number:
            continue  # the first two prompts run together; the last prompt runs in chunks, and begins like the second
        while len(prompts):
            if prefill := prompts.run((_CHUNK if len(rows) else 2 * _CHUNK) if in_chunks else 0):
                rows.join(prefill)
            if len(rows):
                rows.run(1)
    while len(rows):
        rows.run(1)
    return [row.ids for row in batch_rows]
