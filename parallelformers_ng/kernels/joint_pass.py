"""Runs several steps of a model through the layers in one call of C, which reads the weights once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallelformers_ng.kernels.decoder_stack import DecoderStack, StepInC
from parallelformers_ng.live_code.stock import foreign_class
from parallelformers_ng.origins import is_known
from parallelformers_ng.sharding.placed import Placed


class PromptStep(NamedTuple):
    """A step of a model for one or more prompts.

    Attributes:
        run: function that runs the model for the step, and returns the logits of each prompt's last token, `[prompts,
            vocabulary]`; any tensor if no logits are wanted.
        last: index of each prompt's last token among the step's tokens; empty if no logits are wanted.
    """

    run: Callable[[], Tensor]
    last: list[int]


class JointPass:
    """Steps of a model for prompts, each over its own cache, that run together with the model's next step.

    ::

        embedding of prompts ───────┐                          ┌─ last tokens of the prompts ─┐
        embedding of other prompts ─┼─ all layers, in one call ┤                              ├─ head
        embedding of the rows ──────┘                          └─ rows ───────────────────────┘

    Attributes:
        max_tokens: largest number of tokens of all steps together; 0 if C cannot compute the layers.
    """

    def __init__(self, model: Any, stack: DecoderStack) -> None:
        self.max_tokens = stack.max_rows
        self._model, self._stack = model, stack
        self._waiting: list[StepInC] = []  # steps of prompts whose layers have not run yet
        self._last: list[list[int]] = []  # for each step of prompts, the indices of the last tokens (`PromptStep.last`)
        self._rows = 0  # number of rows of the decode step that runs together with prompts
        self._logits = torch.empty(0)

    @classmethod
    def of(cls, model: nn.Module) -> JointPass | None:
        """Return a pass for a model. Return None if other ranks have some of the layers, if the model has no
        `DecoderStack`, or if hooks or foreign code would see the tokens of several steps together."""
        stacks, modules = list[DecoderStack](), [model]
        while modules:
            module = modules.pop()
            if isinstance(module, DecoderStack):
                stacks.append(module)
            elif module._forward_hooks or module._forward_pre_hooks or _runs_foreign_code(module):
                return None
            else:
                modules.extend(module.children())
        is_whole = len(stacks) == 1 and not isinstance(stacks[0][-1], Placed)
        return cls(model, stacks[0]) if is_whole else None

    def run(self, steps: Sequence[PromptStep], beside: Callable[[], object] | None) -> list[Tensor]:
        """Run as many of the first `steps` as one call of C can compute, together with the decode step that `beside`
        runs.

        If C cannot compute the layers, the first of `steps` runs alone, and `beside` is not called.

        Returns:
            For each of the steps that ran, the logits of its prompts' last tokens, `[prompts, vocabulary]`.
        """
        ran_alone = list[Tensor]()
        try:
            self._stack.instead = self._wait
            for step in steps:
                try:
                    ran_alone.append(step.run())
                    break  # no exception: the model has run the step without `_wait`
                except _LayersWait:
                    if len(self._waiting) == len(self._last):
                        break
                    self._last.append(step.last)
            if self._waiting and beside is not None:
                self._stack.instead = self._join
                with self._model.register_forward_hook(self._separate):
                    beside()
            if self._waiting:
                self._run_alone()
            jointly = self._logits.split([len(last) for last in self._last]) if self._last else ()
            return [*jointly, *ran_alone]
        finally:
            self._stack.instead = None

    def _wait(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        step = self._stack.step_in_c(hidden, **kwargs)
        if step is not None and step.fits_beside(self._waiting):
            self._waiting.append(step)
        raise _LayersWait

    def _join(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """Run the layers for all steps. The prompts' last tokens become further rows of the output, for the head."""
        step = self._stack.step_in_c(hidden, **kwargs)
        if step is None or hidden.shape[1] > 1 or not self._waiting or not step.fits_beside(self._waiting):
            return self._stack.run_alone(hidden, **kwargs)
        of_rows, *of_prompts = step.stack.run(step, *self._waiting)
        self._waiting, self._rows = [], len(of_rows)
        return torch.cat((of_rows, *self._last_tokens(of_prompts)))

    def _run_alone(self) -> None:
        outputs, self._waiting = self._waiting[0].stack.run(*self._waiting), []
        if last_tokens := self._last_tokens(outputs):
            hidden = torch.cat(last_tokens)
            self._stack.instead = lambda *_, **__: hidden
            ids = torch.zeros((len(hidden), 1), dtype=torch.long)  # dummy ids: the layers have run, only the head runs
            self._logits = self._model(input_ids=ids, use_cache=False, return_dict=True).logits[:, -1]

    def _last_tokens(self, outputs: list[Tensor]) -> list[Tensor]:
        # Hidden states of the prompts' last tokens, `[prompts, 1, hidden]` for each step.
        return [output[range(len(last)), last, None] for output, last in zip(outputs, self._last, strict=True) if last]

    def _separate(self, _model: nn.Module, _inputs: Any, output: Any) -> Any:
        """Take the logits of the prompts out of the model's output for the rows."""
        if 0 < self._rows < len(output.logits):
            output.logits, self._logits = output.logits[: self._rows], output.logits[self._rows :, -1]
        self._rows = 0
        return output


def _runs_foreign_code(module: nn.Module) -> bool:
    # Such a forward could notice that several steps run together. `may_serve` covers patches of libraries.
    cls = type(module)
    return "forward" in vars(module) or (not is_known(cls) and bool(foreign_class(cls)))


class _LayersWait(Exception):
    """Raised to stop a step before its layers, which run later together with those of other steps."""
