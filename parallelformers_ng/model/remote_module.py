"""Defines the modules of a parallelized model in the caller's process; workers have the weights and run the methods.

Each module stays the same object in the same place; its class becomes a subclass of `RemoteModule` and of its former
class. Modules without weights also compute in the caller's process, see `remote_tree.PlainPart`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from parallelformers_ng.checkpoint.lazy import RemoteTensor, values
from parallelformers_ng.checkpoint.progress import Progress
from parallelformers_ng.checkpoint.read_only import ReadOnlyTensor
from parallelformers_ng.errors import NotPortableError, ParallelError
from parallelformers_ng.model.calls import Calls
from parallelformers_ng.model.dispatcher import CallOptions
from parallelformers_ng.model.marks import REMOTE, has_own_loop
from parallelformers_ng.model.methods import REFUSED, REFUSED_OF_PEFT, generates, reads_weights
from parallelformers_ng.model.read_attributes import AGAIN, FROZEN, is_frozen_code, may_be_read
from parallelformers_ng.sharding.attributes import REMOVED
from parallelformers_ng.sharding.wholeness import Alone, alone, part_refusal

_TABLES = ("_parameters", "_buffers", "_modules")
FIXED = frozenset({"__class__", "forward", "use_kernels", "hf_device_map"})
"""Attributes that determine how and where a module computes; setting one raises ParallelError."""


class Remote:
    """Connects a module of a parallelized model to the workers.

    Attributes:
        parts: remote submodules of the model; empty for a submodule.
        plain_parts: submodules of the model that also compute in the caller's process; empty for a submodule.
        around: peft's wrappers of the model; empty for a submodule.
        here: names of attributes that only this process has.
        tables: original parameters, buffers and children of the module, which `unlock` restores.
    """

    def __init__(self, model: nn.Module, calls: Calls, path: str) -> None:
        self._model = weakref.ref(model)
        self.calls = calls
        self.path = path
        self.parts: list[nn.Module] = []
        self.plain_parts: list[nn.Module] = []
        self.around: list[nn.Module] = []
        self.here: set[str] = set()
        self.tables: dict[str, dict[str, Any]] = {}

    @property
    def model(self) -> Any:
        model = self._model()
        if model is None:
            raise ParallelError(f"{self.path} belongs to a parallelized model that was deleted; its weights are gone")
        return model

    @functools.cached_property
    def weights(self) -> list[nn.Parameter]:
        return [*self.model.parameters()]

    @functools.cached_property
    def alone(self) -> Alone:
        """Whether a call of only this module returns its whole result; `Alone.UNSURE` if the plan does not tell."""
        return Alone.WHOLE if not self.path else alone(self.calls.deployment.plan, self.path)

    @functools.cached_property
    def cut(self) -> str:
        """Readable description of how the module itself is sharded; "" if it is not sharded."""
        plan = self.calls.deployment.plan
        kinds = [layer.kind for layer in plan.layers if layer.path == self.path]
        tensor = plan.tensors.get(f"{self.path}.weight")
        if tensor is not None and not tensor.is_replicated:
            kinds += ["weight " + ", ".join(str(list(shard.shape(tensor.shape))) for shard in tensor.shards)]
        return "cut=(" + ": ".join(kinds) + ")" if kinds else ""

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of the module on the workers. A backward pass of the result raises ParallelError."""
        if self.alone is Alone.PART:
            raise ParallelError(part_refusal(self.path))
        options = CallOptions(unsure=self.alone is Alone.UNSURE)
        return _refuse_gradients(self.model, self.calls.call(self.path, method, args, kwargs, options), (args, kwargs))


class _NoGradients(torch.autograd.Function):
    """The identity function, with a backward pass that raises ParallelError."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, name: str, *_: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(output)  # makes torch return the same tensor object, and not a copy
        ctx.name = name
        return output

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ParallelError(
            f"{ctx.name} is parallelized and does not support training: the workers compute without gradients. Call"
            " deparallelize() first"
        )


def _refuse_gradients(model: nn.Module, output: Any, inputs: Any) -> Any:
    """Make the backward pass of an output raise ParallelError.

    As in the plain model, an output requires a gradient if gradients are enabled in this thread, and a weight or an
    input requires one. Only floating-point tensors are changed.
    """
    if torch.is_grad_enabled():
        sources = [tensor for tensor in _tensors_in(inputs) if tensor.requires_grad]
        with torch._C.DisableTorchFunctionSubclass():  # the override of `RemoteTensor` would slow each access down
            is_trained = any(parameter.requires_grad for parameter in remote_of(model).weights)
        if is_trained:
            sources.append(torch.empty(0, device="cpu", requires_grad=True))
        for tensor in _tensors_in(output) if sources else ():
            if tensor.is_floating_point():
                _NoGradients.apply(tensor, type(model).__name__, *sources)
    return output


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):  # a ModelOutput is a dict, too
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part)


class RemoteModule(nn.Module):
    """Mixin that comes before the module's own class while the model is parallelized."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return remote_of(self).call("__call__", args, kwargs)  # nn.Module.__call__ would run hooks in this process

    def __setattr__(self, name: str, value: Any) -> None:
        table = self._table_of(name)
        if table is not None and table[name] is value:
            return
        is_part = table is not None or isinstance(value, (nn.Module, nn.Parameter))
        if not _send_attribute(self, name, value, "setting", is_part) and name not in vars(self):
            remote_of(self).here.add(name)
        super().__setattr__(name, value)

    def _table_of(self, name: str) -> dict[str, Any] | None:
        return next((vars(self)[table] for table in _TABLES if name in vars(self)[table]), None)

    def __delattr__(self, name: str) -> None:
        _send_attribute(self, name, REMOVED, "deleting", self._table_of(name) is not None)
        super().__delattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParallelError(refusal(self, "pickling or copying it", "its weights are on the workers"))

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), remote_of(self).cut)))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Apply `fn` to all tensors; raise ParallelError if `fn` changes a data type or device."""
        if self._changed_by(lambda module: module._apply(fn), recurse):
            raise ParallelError(refusal(self, "casting or moving it", "its weights are on the workers"))
        with torch.no_grad():
            for tensor in (*self.parameters(recurse), *self.buffers(recurse)):
                fn(tensor)
        return self

    def _changed_by(self, move: Callable[[nn.Module], Any], recurse: bool = True) -> bool:
        """Whether `move`, such as a call of `to`, would change the data type or the device of any weight."""
        probe = nn.Module()
        for dtype in {tensor.dtype for tensor in (*self.parameters(recurse), *self.buffers(recurse))}:
            probe.register_buffer(str(len(probe._buffers)), torch.empty(0, dtype=dtype, device="cpu"))
        before = list(probe._buffers.values())
        move(probe)
        return any(new is not old for new, old in zip(probe._buffers.values(), before, strict=True))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the whole weights on CPU, in the model's data types. The tensors are read-only.

        Tied entries share memory, as in any state dict.

        With `keep_vars=True` the values are the parameters themselves, and a weight is gathered only when it is read.

        Raises:
            GroupError: only the workers have the weights, and the workers failed or have ended.
            CheckpointError: a checkpoint file is damaged, or has changed.
        """
        kwargs.update(zip(("destination", "prefix", "keep_vars"), args, strict=False))
        if kwargs.get("keep_vars") or isinstance(kwargs.get("keep_vars"), _Gathered):
            return super().state_dict(**kwargs)
        remote = remote_of(self)
        total = sum(tensor.numel() * tensor.element_size() for tensor in (*self.parameters(), *self.buffers()))
        with remote.calls.deployment.gathering(type(self).__name__, total) as advance:
            return super().state_dict(**{**kwargs, "keep_vars": _Gathered(advance)})

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: Any) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for short, tensor in (*self._parameters.items(), *self._buffers.items()):
            if prefix + short in destination and isinstance(tensor, RemoteTensor) and isinstance(keep_vars, _Gathered):
                destination[prefix + short] = keep_vars.whole(tensor)


def _send_attribute(module: RemoteModule, name: str, value: Any, doing: str, is_part: bool) -> bool:
    """Set or delete an attribute on the workers if the model's code may read it; return whether it may."""
    if is_part or name in FIXED:
        raise ParallelError(refusal(module, f"{doing} {name}", "its modules and weights are on the workers"))
    remote = remote_of(module)
    if is_frozen_code(module, name, value, remote.calls.names, remote.here):
        raise ParallelError(refusal(module, f"{doing} {name}", FROZEN, AGAIN))
    may_read = may_be_read(module, name, value, remote.calls.names)
    if may_read:
        remote.calls.set_attribute(remote.path, name, value)
    return may_read


class _Gathered:
    """Gathers each weight of one state dict once. Passed as the argument `keep_vars`, it counts as False."""

    def __init__(self, advance: Progress) -> None:
        self._advance = advance
        self._whole: dict[int, torch.Tensor] = {}

    def __bool__(self) -> bool:
        return False

    def whole(self, tensor: RemoteTensor) -> torch.Tensor:
        if id(tensor) not in self._whole:
            self._whole[id(tensor)] = values(tensor).detach().as_subclass(ReadOnlyTensor)
            self._advance(self._whole[id(tensor)].nbytes)
        return self._whole[id(tensor)]


class _Locked(dict):
    """A read-only dict of a module's parameters, buffers or children."""

    def __init__(self, items: dict[str, Any], module: nn.Module) -> None:
        super().__init__(items)
        self._module = weakref.ref(module)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ParallelError(refusal(self._module(), "replacing its parts", "the parts are on the workers"))

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self or self[name] is not value:
            self._refuse()

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def lock(module: nn.Module) -> None:
    """Make the parameters, buffers and children of a module read-only: a change raises ParallelError."""
    tables = remote_of(module).tables = {table: vars(module)[table] for table in _TABLES}
    vars(module).update((table, _Locked(items, module)) for table, items in tables.items())


def unlock(module: nn.Module) -> None:
    vars(module).update(remote_of(module).tables)


def remote_of(module: nn.Module) -> Remote:
    return vars(module)[REMOTE]


def refusal(module: Any, what: str, why: str, advice: str = "Call deparallelize() first") -> str:
    """Return the error message for an operation that a parallelized model does not support; `why` is a clause."""
    path = remote_of(module).path if isinstance(module, RemoteModule) else ""
    whose = f"{path} belongs to a parallelized model" if path else f"{type(module).__name__} is parallelized"
    return f"{whose} and does not support {what}: {why}. {advice}"


def replaced(place: str, name: str, original: Callable) -> Callable:
    """Return the replacement of a method for its `place` (see `place_of`). It keeps the signature, which `generate` and
    pipelines inspect. For a module that is not remote, it runs the original."""
    run = _REPLACEMENTS[place]

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if REMOTE not in vars(self):
            return original(self, *args, **kwargs)
        return run(self, name, original, args, kwargs)

    code = f"A parallelized model runs `{run.__name__}` of parallelformers_ng/model/remote_module.py instead."
    method.__doc__ = f"{inspect.cleandoc(original.__doc__ or '')}\n\n{code}".strip()
    return method


def _forwarded(module: Any, name: str, original: Callable, args: Any, kwargs: Any) -> Any:
    """Run a method of modelling code on the workers if possible, and otherwise in this process.

    The method runs in this process if an argument or the result, such as a generator, cannot be sent. A method that
    calls `generate` also runs here if a `generate` of this thread runs its loop here.
    """
    remote = remote_of(module)
    if name == "forward":
        return remote.call(name, args, kwargs)
    with remote.calls.with_adapters():
        what = f"{name} runs in this process, with a request per call of a module, which is slower"
        if remote.calls.deployment.plan.world_size > 1 and reads_weights(type(module), original):  # type: ignore[arg-type]
            remote.calls.say_once(what, "it reads weights or widths, and each worker has a part of them")
        elif not (has_own_loop() and generates(type(module), original)):  # type: ignore[arg-type]
            try:
                return remote.call(name, args, kwargs)
            except NotPortableError as error:
                remote.calls.say_once(what, str(error))
        return original(module, *args, **kwargs)


def _generated(module: Any, name: str, original: Callable, args: Any, kwargs: Any) -> Any:
    """Run `generate` on the workers if possible, and otherwise its loop in this process."""
    remote = remote_of(module)
    return remote.calls.generate(
        remote.model, module, remote.path, original, {**_by_name(original, args, kwargs), **kwargs}
    )


def _refused(module: Any, name: str, original: Callable, args: Any, kwargs: Any) -> Any:
    raise ParallelError(refusal(module, f"{name}()", f"it {(REFUSED | REFUSED_OF_PEFT)[name]}"))


def _switched(module: Any, name: str, original: Callable, args: Any, kwargs: Any) -> Any:
    adapters = remote_of(module).calls.adapters
    with contextlib.nullcontext() if adapters is None else adapters.switching:
        return original(module, *args, **kwargs)


_REPLACEMENTS: dict[str, Callable[[Any, str, Callable, Any, Any], Any]] = {
    "forwarded": _forwarded, "generated": _generated, "refused": _refused, "switched": _switched,
}  # fmt: skip


def _by_name(generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the positional arguments of a `generate` as a dict, by name.

    A `generate` of the user that takes `*args` passes them on to transformers' `generate`, which has the names.
    """
    parameters = inspect.signature(generate).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        names += [*inspect.signature(GenerationMixin.generate).parameters][len(names) : -1]
    if len(args) >= len(names):
        raise TypeError(f"generate() takes {len(names)} positional arguments but {len(args) + 1} were given")
    named = dict(zip(names[1:], args, strict=False))
    for name in named.keys() & kwargs.keys():
        raise TypeError(f"generate() got multiple values for argument {name!r}")
    return named
