"""The forward hooks on the modules of a parallelized model, and the refusal of hooks that cannot work."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from parallelformers_ng.errors import DeadlineExpiredError, ParallelError
from parallelformers_ng.generation.caches import map_handles
from parallelformers_ng.generation.object_state import ObjectState
from parallelformers_ng.hooks.pickling import Hook, HookChanges, Kind, described, is_of_library, pack
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensors import is_within
from parallelformers_ng.wire.frame import Handle

_FORWARD: tuple[Kind, Kind] = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


class HookRegistry:
    """The forward hooks of one model while it is parallelized.

    The modules get tables that tell the registry of each new hook, so that a call looks only where there may be one. A
    table that has hooks already is left in place, for their handles refer to it, and each call looks at it.

    Args:
        model: every hook that it has passes `check`.
        plan: how it is cut.
    """

    def __init__(self, model: nn.Module, plan: ShardPlan) -> None:
        self._model = weakref.ref(model)
        self._plan = plan
        self.paths: dict[str, weakref.ref[nn.Module]] = {}
        """Modules that may have hooks; `present` looks."""
        self._noting = threading.Lock()  # while those are read or changed
        self._turn = threading.RLock()
        for path, module in model.named_modules():
            if any(vars(module)[name] for name in _FORWARD):
                self.paths[path] = weakref.ref(module)
            for name in (*_FORWARD, *_BACKWARD):
                if not vars(module)[name]:
                    vars(module)[name] = _Table(self, path, name)

    @contextlib.contextmanager
    def turn(self, deadline: float) -> Iterator[CallHooks | None]:
        """The hooks for a call, of each module in their order; None if there are none. Calls come one after another,
        for each begins with what the one before has noted.

        Raises:
            ParallelError: one cannot be called, or there is a global one.
            DeadlineExpiredError: other threads' calls took until `deadline`, on the clock of `time.monotonic`.
        """
        _refuse_global_hooks()
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeadlineExpiredError("other calls of this model, whose forward hooks note something, were not done")
        try:
            hooks, model = self.present(), self._model()
            yield CallHooks(model, hooks) if model is not None and hooks else None
        finally:
            self._turn.release()

    def present(self) -> list[Hook]:
        """Return the hooks that the modules have now.

        Raises:
            ParallelError: one cannot be called, in words; of a table that was left in place it is only known now.
        """
        with self._noting:
            references = [(path, reference()) for path, reference in self.paths.items()]
            modules = [(path, module) for path, module in references if module is not None]
            for path, module in modules:
                if not any(vars(module)[name] or not isinstance(vars(module)[name], _Table) for name in _FORWARD):
                    del self.paths[path]  # the tables tell of the next one
        hooks = [hook for path, module in modules for hook in hooks_of(path, module)]
        for hook in hooks:
            check_hook(self._plan, hook.path, hook.kind, hook.call)
        return hooks

    def leave(self) -> None:
        """Make the hooks ordinary ones from now on."""
        model: Any = self._model()
        for module in model.modules():
            for name in (*_FORWARD, *_BACKWARD):
                table = vars(module)[name]
                if isinstance(table, _Table):
                    if table:
                        table.registered = None  # their handles know this table
                    else:
                        vars(module)[name] = OrderedDict()

    def admit(self, path: str, table: str, hook: Any) -> None:
        """See that a hook that is being registered can be called on the ranks.

        Raises:
            ParallelError: it cannot be, in words.
        """
        check_hook(self._plan, path, table, hook)
        if table in _FORWARD and not is_of_library(hook):
            model: Any = self._model()
            pack(model, [Hook(path, table, 0, hook)], [])

    def note(self, path: str, table: str) -> None:
        """Take note of a module whose table has a new hook."""
        if table in _FORWARD:
            model: Any = self._model()
            with self._noting:
                self.paths[path] = weakref.ref(model.get_submodule(path))


class CallHooks:
    """The hooks of one call.

    Attributes:
        packed: the hooks, ready to be sent.
    """

    def __init__(self, model: nn.Module, hooks: list[Hook]) -> None:
        self._model = model
        self._local: list[Any] = []
        self.packed = pack(model, hooks, self._local)
        self._state = ObjectState([hook.call for hook in hooks], with_globals=True)
        self.packed.parts = len(self._state.parts)

    def check_apart_from(self, arguments: ObjectState) -> None:
        """
        Raises:
            ParallelError: a hook and an argument have an object in common, which cannot come home twice.
        """
        if self._state.shares(arguments):
            raise ParallelError(
                "a forward hook shares an object with a logits processor, a stopping criterion or"
                " prefix_allowed_tokens_fn; each would bring home a copy of its own. Give each its own object"
            )

    def bring_home(self, changes: HookChanges | None, receive: Callable[[Handle], Any]) -> None:
        """Write down here what the hooks have noted on rank 0.

        Args:
            changes: None if they were not called.
            receive: makes of the handle of a cache what the caller gets.
        """

        def cache_of(handle: Handle) -> Any:
            if handle.kind == "module":
                return self._model.get_submodule(handle.payload)
            return self._local[handle.payload] if handle.kind == "placeholder" else receive(handle)

        if changes is None:
            return
        states, attributes = changes
        self._state.restore(states, lambda value: map_handles(value, cache_of))
        for (path, name), value in attributes.items():
            vars(self._model.get_submodule(path))[name] = map_handles(value, cache_of)


class _Table(OrderedDict):
    """A table of hooks that tells the registry of each new one."""

    def __init__(self, registered: HookRegistry, path: str, name: str) -> None:
        super().__init__()
        self.registered: HookRegistry | None = registered
        self._place = path, name

    def __setitem__(self, number: int, hook: Any) -> None:
        if self.registered is not None:
            self.registered.admit(*self._place, hook)
        super().__setitem__(number, hook)
        if self.registered is not None:
            self.registered.note(*self._place)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (list(self.items()),)


def check(model: nn.Module, plan: ShardPlan) -> None:
    """See that a model that is about to be cut has no hook which it cannot have then.

    Raises:
        ParallelError: it has, in words.
    """
    _refuse_global_hooks()
    for path, module in model.named_modules():
        for table in (*_FORWARD, *_BACKWARD):
            for hook in vars(module)[table].values():
                check_hook(plan, path, table, hook)
    hooks = [hook for path, module in model.named_modules() for hook in hooks_of(path, module)]
    if hooks:
        pack(model, hooks, [])


def check_hook(plan: ShardPlan, path: str, table: str, hook: Any) -> None:
    """
    Raises:
        ParallelError: a cut model cannot have this hook in this table of the module at `path`.
    """
    if is_of_library(hook):
        return
    who = f"{described(hook)} on {path or 'the model'}"
    if table in _BACKWARD:
        raise ParallelError(
            f"the backward hook {who} is refused: the workers compute without gradients, so that it would never be"
            " called. Call deparallelize() first, or remove it"
        )
    block = next((block for block in plan.blocks if path and path != block and is_within(path, block)), None)
    if block is not None and plan.world_size > 1:
        where = f"{block}, which is cut" if block else "the model, which is cut as one block"
        raise ParallelError(
            f"the forward hook {who} is refused: it lies within {where}, and would see one worker's part. Register it"
            f" on {block or 'the model'} or something above it, or call deparallelize() first"
        )
    owner = getattr(hook, "__self__", hook)
    if isinstance(owner, nn.Module):
        raise ParallelError(
            f"the forward hook {who} is refused: it belongs to a module, {type(owner).__name__}, and what it notes"
            " there would stay on the workers. Make it a function, or a method of an object that is no module"
        )


def hooks_of(path: str, module: nn.Module) -> Iterator[Hook]:
    """Yield the forward hooks that the caller has registered on a module."""
    for kind in _FORWARD:
        with_kwargs = vars(module)[f"{kind}_with_kwargs"]
        always = module._forward_hooks_always_called if kind == "_forward_hooks" else {}
        for number, hook in [*vars(module)[kind].items()]:  # another thread may be registering one
            if not is_of_library(hook):
                yield Hook(path, kind, number, hook, number in with_kwargs, number in always)


def _refuse_global_hooks() -> None:
    if torch_module._has_any_global_hook():
        raise ParallelError(
            "torch has a global module hook. It would be called for every module: within the cut blocks it would see"
            " one worker's part. Remove it, and register a hook on each module that needs it"
        )
