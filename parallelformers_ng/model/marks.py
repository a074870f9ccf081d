"""Marks of a parallelized model: the attribute with its workers, and `hf_device_map`.

`hf_device_map` keeps other libraries from moving a parallelized model to another device.

If the machine has an accelerator, transformers' pipelines and Trainer, and accelerate, move every model to the
accelerator, unless the model has an `hf_device_map`. The libraries read the map as follows:

- a pipeline without `device=` puts its inputs on the first device of the map; a pipeline with `device=` is refused;
- Trainer does not move a model that has a map, and does not copy the model to several GPUs if the map names another
  device than Trainer's own ("cpu" does not count);
- accelerate does not move a model whose map has more than one entry.

On a machine without an accelerator, the model has no map, so that a pipeline with `device="cpu"` still works.
"""

from __future__ import annotations

import contextvars
from contextlib import AbstractContextManager

import torch
from torch import nn

from parallelformers_ng.runtime.limits import set_within

REMOTE = "_parallelformers_ng"
"""Attribute of a parallelized model and of its submodules: the connection to the workers, `remote_module.Remote`."""
_own_loop = contextvars.ContextVar("own_loop", default=False)


def hf_device_map(model: nn.Module) -> dict[str, torch.device]:
    """Return submodule name → device of its inputs (always CPU), in the form that accelerate uses."""
    if _own_loop.get() or not torch.accelerator.is_available():
        raise AttributeError("hf_device_map")
    return dict.fromkeys(["", *(name for name, _ in model.named_children())], torch.device("cpu"))


has_own_loop = _own_loop.get
"""Returns whether a `generate` of this thread runs its loop in this process."""


def own_loop() -> AbstractContextManager[None]:
    """Hide `hf_device_map` while `generate` runs its loop in this process. If a model has a map, `generate` adds a hook
    to the encoder that moves outputs to the device of the inputs; a parallelized model does not need the hook."""
    return set_within(_own_loop, True)
