"""Records the active adapters of a parallelized model: a call keeps the adapters that were active at its start."""

from __future__ import annotations

import contextvars
import threading
from contextlib import AbstractContextManager

from torch import nn

from parallelformers_ng.runtime.limits import set_within
from parallelformers_ng.sharding.active_adapters import ActiveAdapters, layers_with_adapters

_of_call = contextvars.ContextVar[tuple[object, ActiveAdapters] | None]("adapters", default=None)


class Adapters:
    """The adapters (LoRA or IA3) of one model.

    Attributes:
        switching: lock for switching adapters and for reading which adapters are active.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.switching = threading.RLock()
        self._layers = layers

    @classmethod
    def of(cls, model: nn.Module) -> Adapters | None:
        layers = layers_with_adapters(model)
        return cls(layers) if layers else None

    def active(self) -> ActiveAdapters:
        """Return the adapters of this thread's current call, or the active adapters outside of a call."""
        of_call = _of_call.get()
        if of_call is not None and of_call[0] is self:
            return of_call[1]
        with self.switching:
            return ActiveAdapters.of(self._layers)

    def of_call(self, active: ActiveAdapters | None = None) -> AbstractContextManager[None]:
        """Fix the adapters of this thread's requests inside the `with` block, even if other threads switch adapters."""
        return set_within(_of_call, (self, active or self.active()))
