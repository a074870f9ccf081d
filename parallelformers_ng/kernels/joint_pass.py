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
    """A forward pass over one or more prompts.

    Attributes:
        run: function that runs the model, and returns the logits of each prompt's last token, `[prompts, vocabulary]`.
        last: index of each prompt's last token among the tokens of the pass; empty if no logits are wanted. `run` may
            then return any tensor.
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
        self._waiting: list[StepInC] = []  # prompts whose layers have not run yet
        self._last: list[list[int]] = []  # `PromptStep.last` of each step in `_waiting`
        self._rows = 0  # number of rows of the decode step, whose logits come first
        self._logits = torch.empty(0)

    @classmethod
    def of(cls, model: nn.Module) -> JointPass | None:
        """Return a joint pass for a model. Return None if the model has no `DecoderStack` or only some of its layers,
        or if hooks or foreign code would see tokens of several steps in one tensor."""
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
        """Run as many of the first `steps` as one call of C can compute, together with a decode step.

        If C cannot compute the layers, the first of `steps` runs alone, and the decode step does not run.

        Args:
            beside: function that runs the decode step; None for no decode step.

        Returns:
            For each of the `steps` that ran, the logits of its prompts' last tokens, `[prompts, vocabulary]`.
        """
        ran_alone = list[Tensor]()
        try:
            self._stack.instead = self._wait
            for step in steps:
                try:
                    ran_alone.append(step.run())
                    break  # without `_LayersWait`, the modules have run the whole step
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
        """Run the layers for the decode step and all waiting prompts. The hidden states of the prompts' last tokens
        follow those of the decode step, so that the model's head computes their logits, too."""
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
            ids = torch.zeros((len(hidden), 1), dtype=torch.long)  # any ids do, because only the head runs
            self._logits = self._model(input_ids=ids, use_cache=False, return_dict=True).logits[:, -1]

    def _last_tokens(self, outputs: list[Tensor]) -> list[Tensor]:
        # Only the prompts' last tokens go through the model's head: `[prompts, 1, hidden]` for each step.
        return [output[range(len(last)), last, None] for output, last in zip(outputs, self._last, strict=True) if last]

    def _separate(self, _model: nn.Module, _inputs: Any, output: Any) -> Any:
        """Forward hook of the model: remove the prompts' logits from the model's output, and keep them."""
        if 0 < self._rows < len(output.logits):
            output.logits, self._logits = output.logits[: self._rows], output.logits[self._rows :, -1]
        self._rows = 0
        return output


def _runs_foreign_code(module: nn.Module) -> bool:
    cls = type(module)
    # Foreign code could notice that several steps run in one call. `may_serve` already refuses patched library code.
    return "forward" in vars(module) or (not is_known(cls) and bool(foreign_class(cls)))


class _LayersWait(Exception):
    """Stops a forward pass before its layers. The layers run later, in one call with those of other passes."""
