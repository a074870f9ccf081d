"""Finds the forward hooks on the modules of a parallelized model, and refuses hooks that cannot work."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.generation.caches import map_handles
from parallelformers_ng.generation.object_state import ObjectState
from parallelformers_ng.hooks.pickling import Hook, HookChanges, Kind, described, is_of_library, pack
from parallelformers_ng.live_code.functions import functions_in, names_in
from parallelformers_ng.live_code.state import holds_module
from parallelformers_ng.live_code.stock import words_of_program
from parallelformers_ng.runtime.limits import turn
from parallelformers_ng.sharding.layer_uses import WEIGHTS_AND_WIDTHS, reads_attributes
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensors import is_within
from parallelformers_ng.wire.frame import Handle

_FORWARD: tuple[Kind, Kind] = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


class HookRegistry:
    """Tracks the forward hooks of one model while the model is parallelized.

    The registry replaces the modules' empty dicts of hooks (`_forward_hooks`, …) by dicts that report each new hook. So
    a call reads only the dicts of modules that may have hooks. A dict that already has hooks is not replaced, because
    the handles of its hooks refer to it, and every call reads it.
    """

    def __init__(self, model: nn.Module, plan: ShardPlan) -> None:
        self._model = weakref.ref(model)
        self._plan = plan
        self.paths: dict[str, weakref.ref[nn.Module]] = {}
        """Path → module, for modules that may have hooks."""
        self._paths_lock = threading.Lock()
        self._turn = threading.RLock()
        for path, module in model.named_modules():
            if any(vars(module)[name] for name in _FORWARD):
                self.paths[path] = weakref.ref(module)
            for name in (*_FORWARD, *_BACKWARD):
                if not vars(module)[name]:
                    vars(module)[name] = _Table(self, path, name)

    @contextlib.contextmanager
    def turn(self, deadline: float) -> Iterator[CallHooks | None]:
        """Wait for the calls of other threads, and yield the hooks of this call; None if the model has no hooks.

        Calls with hooks run one after another, because each call starts with the hooks' state from the previous call.
        """
        _refuse_global_hooks()
        late = "calls with forward hooks run one after another, and earlier calls did not end in time"
        with turn(self._turn, deadline, late):
            hooks, model = self.present(), self._model()
            yield CallHooks(model, hooks) if model is not None and hooks else None

    def words(self) -> set[str]:
        with self._paths_lock:
            references = [(path, reference()) for path, reference in self.paths.items()]
        calls = [hook.call for path, module in references if module is not None for hook in hooks_of(path, module)]
        return words_of_program((*calls, *(type(call).__call__ for call in calls)))

    def present(self) -> list[Hook]:
        """Return the hooks that are registered now. Raise ParallelError if one of them cannot run on the workers."""
        with self._paths_lock:
            references = [(path, reference()) for path, reference in self.paths.items()]
            modules = [(path, module) for path, module in references if module is not None]
            for path, module in modules:
                if not any(vars(module)[name] or not isinstance(vars(module)[name], _Table) for name in _FORWARD):
                    del self.paths[path]  # `note` adds the path again at the next hook
        hooks = [hook for path, module in modules for hook in hooks_of(path, module)]
        for hook in hooks:
            check_hook(self._plan, hook.path, hook.kind, hook.call)
        return hooks

    def leave(self) -> None:
        """Stop tracking: give the modules ordinary dicts of hooks again, with the same hooks."""
        model: Any = self._model()
        for module in model.modules():
            for name in (*_FORWARD, *_BACKWARD):
                table = vars(module)[name]
                if isinstance(table, _Table):
                    if table:
                        table.registered = None  # `table` stays, because the handles of its hooks refer to it
                    else:
                        vars(module)[name] = OrderedDict()

    def admit(self, path: str, table: str, hook: Any) -> None:
        """Raise ParallelError if a new hook cannot run on the workers."""
        check_hook(self._plan, path, table, hook)
        if table in _FORWARD and not is_of_library(hook):
            model: Any = self._model()
            pack(model, [Hook(path, table, 0, hook)], [])

    def note(self, path: str, table: str) -> None:
        """Record that a module has a new hook; ignore backward hooks."""
        if table in _FORWARD:
            model: Any = self._model()
            with self._paths_lock:
                self.paths[path] = weakref.ref(model.get_submodule(path))


class CallHooks:
    """The hooks of one call in the caller's process.

    Attributes:
        packed: message with the hooks for the workers.
    """

    def __init__(self, model: nn.Module, hooks: list[Hook]) -> None:
        self._model = model
        self._local: list[Any] = []
        self._state = ObjectState([hook.call for hook in hooks], stand_in=lambda part: part)
        self.packed = pack(model, hooks, self._local, self._state.followed())

    def check_apart_from(self, arguments: ObjectState) -> None:
        """Raise ParallelError if a hook and an argument share an object: the workers would change two copies of it."""
        if self._state.shares(arguments):
            raise ParallelError(
                "a forward hook shares an object with a logits processor, a stopping criterion or"
                " prefix_allowed_tokens_fn; the changes of only one of them could be kept. Use separate objects"
            )

    def apply_changes(self, changes: HookChanges | None, receive: Callable[[Handle], Any]) -> None:
        """Apply what the hooks changed on rank 0 to the caller's objects and modules."""

        def local_object(handle: Handle) -> Any:
            if handle.kind == "module":
                return self._model.get_submodule(handle.payload)
            return self._local[handle.payload] if handle.kind == "placeholder" else receive(handle)

        if changes is None:
            return
        states, attributes, removed = changes
        self._state.restore(states, lambda value: map_handles(value, local_object))
        for (path, name), value in attributes.items():
            vars(self._model.get_submodule(path))[name] = map_handles(value, local_object)
        for payload in removed:
            self._local[payload].remove()


class _Table(OrderedDict):
    """A module's dict of hooks that reports each new hook to the registry."""

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
    """Raise ParallelError before parallelization if a hook of the model cannot run on the workers."""
    _refuse_global_hooks()
    for path, module in model.named_modules():
        for table in (*_FORWARD, *_BACKWARD):
            for hook in vars(module)[table].values():
                check_hook(plan, path, table, hook)
    hooks = [hook for path, module in model.named_modules() for hook in hooks_of(path, module)]
    if hooks:
        pack(model, hooks, [])


def check_hook(plan: ShardPlan, path: str, table: str, hook: Any) -> None:
    """Raise ParallelError for a backward hook, a hook inside a sharded block, or a hook that belongs to a module."""
    if is_of_library(hook):
        return
    who = f"{described(hook)} on {path or 'the model'}"
    if table in _BACKWARD:
        raise ParallelError(
            f"the backward hook {who} is refused: the workers compute without gradients, so the hook would never be"
            " called. Call deparallelize() first, or remove the hook"
        )
    block = next((block for block in plan.blocks if path and path != block and is_within(path, block)), None)
    if block is not None and plan.world_size > 1:
        where = f"{block}, which is sharded" if block else "the model, which is sharded as one block"
        raise ParallelError(
            f"the forward hook {who} is refused: the module is inside {where}, so the hook would see one worker's"
            f" shard. Register the hook on {block or 'the model'} or on a parent module, or call deparallelize() first"
        )
    if plan.world_size > 1 and _reads_shards(plan, path, hook):
        raise ParallelError(
            f"the forward hook {who} is refused: it reads weights or widths, and each worker has a part of them. Read"
            " them outside of the hook, or call deparallelize() first"
        )
    owner = getattr(hook, "__self__", hook)
    if isinstance(owner, nn.Module):
        raise ParallelError(
            f"the forward hook {who} is refused: the hook belongs to a module, {type(owner).__name__}, and changes of"
            " that module would stay on the workers. Use a function, or a method of an object that is not a module"
        )


def _reads_shards(plan: ShardPlan, path: str, hook: Any) -> bool:
    """Whether a hook reads weights or widths, and its module or another module that it knows is sharded."""
    functions = [*functions_in(hook)] or [*functions_in(type(hook).__call__)]
    readers = [each for each in functions if reads_attributes(each.__code__, WEIGHTS_AND_WIDTHS)]
    if any(is_within(layer.path, path) for layer in plan.layers):
        return bool(readers)
    known = (each.__globals__.get(name) for each in readers for name in names_in(each.__code__))
    return any(isinstance(value, nn.Module) for value in known) or any(map(holds_module, readers))


def hooks_of(path: str, module: nn.Module) -> Iterator[Hook]:
    for kind in _FORWARD:
        with_kwargs = vars(module)[f"{kind}_with_kwargs"]
        always = module._forward_hooks_always_called if kind == "_forward_hooks" else {}
        for number, hook in [*vars(module)[kind].items()]:  # a copy, because other threads may register hooks
            if not is_of_library(hook):
                yield Hook(path, kind, number, hook, number in with_kwargs, number in always)


def _refuse_global_hooks() -> None:
    if torch_module._has_any_global_hook():
        raise ParallelError(
            "torch has a global module hook, which torch calls for every module. Inside sharded blocks the hook would"
            " see one worker's shard. Remove the hook, and register a hook on each module that needs it"
        )
