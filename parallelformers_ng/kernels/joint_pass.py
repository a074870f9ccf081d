"""Runs two steps of a model through the layers in one call of C, which reads the weights once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parallelformers_ng.kernels.decoder_stack import DecoderStack, StepInC
from parallelformers_ng.sharding.placed import Placed


class JointPass:
    """A step of a model, for example for prompts, that runs together with the model's next step.

    ::

        embedding of the prompts ─┐                          ┌─ last tokens of the prompts ─┐
                                  ├─ all layers, in one call ┤                              ├─ head
        embedding of the rows ────┘                          └─ rows ───────────────────────┘

    Args:
        model: model of the rank.
        stack: the only stack of layers of the model.
        columns: index of the token of each prompt whose logits are wanted; empty for no logits.

    Attributes:
        logits: logits of these tokens, `[prompts, vocabulary]`, after `run`; empty for no logits.
    """

    def __init__(self, model: Any, stack: DecoderStack, columns: list[int]) -> None:
        self.logits = torch.empty(0)
        self._model, self._stack, self._columns = model, stack, columns
        self._prompts: StepInC | None = None  # the first step, until its layers run
        self._rows = 0

    @classmethod
    def of(cls, model: nn.Module, columns: list[int]) -> JointPass | None:
        """Return a pass of a model; None if other ranks have layers, if the model has no stack of layers, or if a hook
        would run twice."""
        stacks, modules = list[DecoderStack](), [model]
        while modules:
            module = modules.pop()
            if isinstance(module, DecoderStack):
                stacks.append(module)
            elif module._forward_hooks or module._forward_pre_hooks:
                return None
            else:
                modules.extend(module.children())
        is_whole = len(stacks) == 1 and not isinstance(stacks[0][-1], Placed)
        return cls(model, stacks[0], columns) if is_whole else None

    def run(self, inputs: dict[str, Any], beside: Callable[[], object]) -> Any:
        """Run a step of the model, and `beside`, whose step runs together with the first step.

        Args:
            inputs: arguments of the model for the first step.
            beside: function that runs the next step of the model.

        Returns:
            None, after both steps. If C cannot compute the first step: the model's output, and `beside` has not run.
        """
        try:
            self._stack.instead = self._keep
            return self._model(**inputs, return_dict=True)
        except _LayersWait:
            self._stack.instead = self._join
            with self._model.register_forward_hook(self._separate):
                beside()
            self._run_alone(inputs)
            return None
        finally:
            self._stack.instead = None

    def _keep(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        self._prompts = self._stack.step_in_c(hidden, **kwargs)
        if self._prompts is None:
            return self._stack.run_alone(hidden, **kwargs)
        raise _LayersWait

    def _join(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """Run the layers for both steps. The last tokens of the prompts go to the head as further rows."""
        part = self._stack.step_in_c(hidden, **kwargs)
        if self._prompts is None or part is None or part.hidden.shape[1] > 1 or not self._prompts.fits_beside(part):
            return self._stack.run_alone(hidden, **kwargs)
        of_prompts, of_rows = self._prompts.run_beside(part)
        self._prompts, self._rows = None, len(of_rows)
        return torch.cat((of_rows, self._last_of(of_prompts))) if self._columns else of_rows

    def _run_alone(self, inputs: dict[str, Any]) -> None:
        """Run the first step's layers if the next step could not run beside them, and then the head."""
        if self._prompts is None:
            return
        hidden = self._last_of(self._prompts.run())
        self._stack.instead = lambda *_, **__: hidden
        if self._columns:
            ids = inputs["input_ids"][:, :1]  # any tokens: the layers' output is known
            self.logits = self._model(input_ids=ids, use_cache=False, return_dict=True).logits[:, -1]

    def _last_of(self, output: Tensor) -> Tensor:
        return output[range(len(self._columns)), self._columns, None]

    def _separate(self, _model: nn.Module, _inputs: Any, output: Any) -> Any:
        """Take the logits of the prompts out of the model's output for the rows."""
        if self._columns and self._prompts is None:
            output.logits, self.logits = output.logits[: self._rows], output.logits[self._rows :, -1]
        return output


class _LayersWait(Exception):
    """The layers of a step run later."""
