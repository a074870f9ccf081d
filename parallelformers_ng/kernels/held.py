"""What a kernel knows of modules whose work it does without calling them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain

from torch import nn
from transformers.utils import output_capturing


class Held:
    """The parameters of some modules, whose addresses a kernel has, and the hooks on these and other modules.

    It is asked at each step, of hundreds of modules, and answers with a few passes over flat lists.

    Args:
        places: modules and the names of their parameters, which may be None.
        modules: all that are not called. A hook on any is a reason to call them.

    Attributes:
        patched: modules that had a forward of their own, not of their class. They must be called.
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str]], modules: Iterable[nn.Module]) -> None:
        places, modules = list(places), list(modules)
        self.patched = [module for module in modules if "forward" in vars(module)]
        self._parameters = [module._parameters for module, _ in places]
        self._names = [name for _, name in places]
        self._tensors = list(map(dict.get, self._parameters, self._names))
        present = [tensor for tensor in self._tensors if tensor is not None]
        self._first = present[:1]  # `to` moves all parameters of a module, and usually of all modules
        self._addresses = [tensor.data_ptr() for tensor in self._first]
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]

    @classmethod
    def together(cls, parts: Sequence[Held]) -> Held:
        """All that the parts hold."""
        whole = cls((), ())
        for name, held in vars(whole).items():
            held.extend(chain.from_iterable(vars(part)[name] for part in parts))
        return whole

    def are_current(self) -> bool:
        """Whether the modules hold the tensors that were looked at, and in the same memory, which `to` changes."""
        same = all(map(operator.is_, map(dict.get, self._parameters, self._names), self._tensors))
        return same and [tensor.data_ptr() for tensor in self._first] == self._addresses

    def are_watched(self) -> bool:
        """Whether a hook on the modules has something to do. Those that transformers has once put there, because hidden
        states or attentions were asked for, stay, and do nothing unless they are asked for again."""
        if not any(self._hooks):
            return False
        places = {getattr(hook, "__module__", "") for hooks in self._hooks for hook in hooks.values()}
        return places != {output_capturing.__name__} or bool(output_capturing._active_collector.get())
