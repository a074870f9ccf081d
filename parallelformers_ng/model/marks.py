"""`hf_device_map`: tells other libraries that the model is on its devices, so that they do not move it.

If there is an accelerator, transformers' pipelines and Trainer, and accelerate, move every model to it, unless the
model has a map of its parts, as accelerate's big models have. They read this of the map:

- a pipeline without `device=` takes the first device of the map for its inputs, and a pipeline with one is refused;
- Trainer leaves a model with a map in place, and spreads no model over GPUs whose map names another device than
  Trainer's own ("cpu" does not count);
- accelerate leaves a model alone whose map has more than one entry.

Without an accelerator there is nowhere to move it to. No map is shown then, so that `device="cpu"` goes on working.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import torch
from torch import nn

_own_loop = contextvars.ContextVar("own_loop", default=False)


def hf_device_map(model: nn.Module) -> dict[str, torch.device]:
    """Return the map of a parallelized model's parts to the devices of their inputs, in accelerate's form."""
    if _own_loop.get() or not torch.accelerator.is_available():
        raise AttributeError("hf_device_map")
    return dict.fromkeys(["", *(name for name, _ in model.named_children())], torch.device("cpu"))


has_own_loop = _own_loop.get
"""Whether a `generate` of this thread runs its loop in this process."""


@contextlib.contextmanager
def own_loop() -> Iterator[None]:
    """Within it, `generate` runs its loop in this process. That hides the map: with one, `generate` puts a hook on the
    encoder that is to bring its outputs to where the inputs are. They are there."""
    token = _own_loop.set(True)
    try:
        yield
    finally:
        _own_loop.reset(token)
