"""The adapters of a parallelized model: a call runs with those that were active when it was made."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator

from torch import nn

from parallelformers_ng.sharding.active_adapters import ActiveAdapters, layers_with_adapters

_of_call = contextvars.ContextVar[tuple[object, ActiveAdapters] | None]("adapters", default=None)


class Adapters:
    """The adapters of one model.

    Attributes:
        switching: held while they are switched, and while a call looks which are active.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.switching = threading.RLock()
        self._layers = layers

    @classmethod
    def of(cls, model: nn.Module) -> Adapters | None:
        """Return the adapters of a model; None if it has none."""
        layers = layers_with_adapters(model)
        return cls(layers) if layers else None

    def active(self) -> ActiveAdapters:
        """Return the adapters of this thread's call; outside of a call, the active ones."""
        of_call = _of_call.get()
        if of_call is not None and of_call[0] is self:
            return of_call[1]
        with self.switching:
            return ActiveAdapters.of(self._layers)

    @contextlib.contextmanager
    def of_call(self, active: ActiveAdapters | None = None) -> Iterator[None]:
        """Within it this thread computes with what is active now, also where a call becomes many requests.

        Args:
            active: adapters to compute with instead.
        """
        token = _of_call.set((self, active or self.active()))
        try:
            yield
        finally:
            _of_call.reset(token)
