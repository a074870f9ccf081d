"""What a parallelized model can do. The model keeps its class, its name and its place in memory; its work moves to the
workers."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelformers_ng.checkpoint.nodes import Node
from parallelformers_ng.checkpoint.progress import progress_bar
from parallelformers_ng.checkpoint.saving import write_pretrained
from parallelformers_ng.compiling import StaticSteps
from parallelformers_ng.deployment import Deployment
from parallelformers_ng.dispatch import Dispatcher
from parallelformers_ng.errors import NotParallelizedError, ParallelError
from parallelformers_ng.memory import detail_report, device_totals, simple_report
from parallelformers_ng.methods import REFUSED, place_of, public_methods
from parallelformers_ng.sharding.inject import get_tensor
from parallelformers_ng.sharding.plan import ShardPlan

_DISPATCHER = "_parallelformers_ng_dispatcher"


class Parallelized:
    """Mixed in before the model's own class while it is parallelized, so that `isinstance` and `super()` hold."""

    # -- where it is ---------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where inputs may be put. The workers move them on, and outputs come back here."""
        return torch.device("cpu")

    def memory_allocated(self) -> dict[str, int]:
        """Bytes of weights (CPU) or of all tensors (CUDA) on each device: `{"cuda:0": bytes, …}`."""
        return {memory.device: memory.allocated for memory in deployment_of(self).memory()}

    def memory_reserved(self) -> dict[str, int]:
        """Bytes that each worker keeps from others: its proportional set size on CPU, torch's pool on CUDA."""
        return {memory.device: memory.reserved for memory in deployment_of(self).memory()}

    memory_cached = memory_reserved
    memory_chached = memory_reserved  # the spelling of Parallelformers' README

    def memory_summary(self, detail: bool = True) -> str:
        """The memory of every rank as text: a table each, or one line each without `detail`."""
        ranks = deployment_of(self).memory()
        return detail_report(ranks) + device_totals() if detail else simple_report(ranks)

    @property
    def shard_plan(self) -> ShardPlan:
        """The plan that the model was cut by."""
        return deployment_of(self).plan

    # -- the end of it -------------------------------------------------------------------------------------------

    def deparallelize(self) -> Any:
        """Stop the workers, gather the weights on CPU and be an ordinary model again. Returns the model."""
        deployment_of(self).gather(self)  # type: ignore[arg-type]
        return _restore_class(self)

    def cpu(self) -> Any:
        """End the parallelization; the model is then on CPU."""
        return self.deparallelize()

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        """End the parallelization and move the whole model to one CUDA device."""
        return self.deparallelize().cuda(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """End the parallelization, then as `nn.Module.to`."""
        return self.deparallelize().to(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The whole weights, gathered on CPU; tied entries share their memory, as in any state dict."""
        listed = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        deployment = deployment_of(self)
        whole: dict[int, torch.Tensor] = {}
        bar = progress_bar(f"gathering {type(self).__name__}", deployment.plan.bytes_whole, deployment.show_progress)
        with bar as advance:
            for name, tensor in listed.items():
                if not isinstance(tensor, torch.Tensor) or tensor.device.type != "meta":
                    continue
                plain = name.removeprefix(prefix)
                held = get_tensor(self, plain, deployment.plan.tensors[plain].is_buffer)  # type: ignore[arg-type]
                if id(held) not in whole:
                    whole[id(held)] = deployment.read(plain)
                    advance(whole[id(held)].nbytes)
                listed[name] = whole[id(held)]
        return listed

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "50GB",
        save_original_format: bool = True,
        progress: bool = True,
        **unsupported: Any,
    ) -> None:
        """Write an ordinary checkpoint, which `from_pretrained` reads; the whole model is never in memory here.

        Args:
            save_directory: where to; made if need be.
            max_shard_size: bytes of a file, "5GB" or a number.
            save_original_format: undo transformers' conversions, as its own `save_pretrained` does.
            progress: show a progress bar where standard error is a terminal.
            unsupported: any other argument of the original is refused.

        Raises:
            CheckpointError: `max_shard_size` is no size.
            OSError: the disk is full, or the directory cannot be written to.
        """
        if unsupported:
            raise ParallelError(
                _refusal(self, f"save_pretrained({', '.join(unsupported)}=…)", "the workers have the weights")
            )
        nodes = _Nodes(deployment_of(self))
        write_pretrained(self, nodes, Path(save_directory), max_shard_size, save_original_format, progress)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise ParallelError(_refusal(self, "casting or moving it", "its weights are with the workers"))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.deparallelize()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParallelError(_refusal(self, "pickling or copying it", "its weights are with the workers"))


def enter(model: nn.Module, deployment: Deployment, seed: int | None = None, steps: StaticSteps | None = None) -> None:
    """Make `model` a parallelized one, in place."""
    object.__setattr__(model, _DISPATCHER, Dispatcher(model, deployment, seed, steps))
    for path, module in model.named_modules():
        if path:
            object.__setattr__(module, "forward", _SubmoduleForward(weakref.ref(model), path, deployment.plan))
    model.__class__ = _parallelized_class(type(model))  # type: ignore[arg-type]


def is_parallelized(model: object) -> bool:
    return isinstance(model, Parallelized)


def dispatcher_of(model: object) -> Dispatcher:
    """What carries a parallelized model's calls.

    Raises:
        NotParallelizedError: the model is not parallelized.
    """
    dispatcher = getattr(model, _DISPATCHER, None)
    if dispatcher is None:
        raise NotParallelizedError(f"{type(model).__name__} is not parallelized")
    return dispatcher


def deployment_of(model: object) -> Deployment:
    """The workers and weights behind a parallelized model."""
    return dispatcher_of(model).deployment


def _restore_class(model: Any) -> Any:
    object.__delattr__(model, _DISPATCHER)
    for path, module in model.named_modules():
        if path:
            object.__delattr__(module, "forward")
    model.__class__ = type(model).__mro__[2]
    return model


@functools.cache
def _parallelized_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `cls` with its name and module, so that what it saves and prints names the original."""
    makers = {"forwarded": _forwarded, "refused": _refused}
    methods: dict[str, Callable | None] = {
        name: makers[place](name, getattr(cls, name))
        for name in public_methods(cls)
        if name not in vars(Parallelized) and (place := place_of(cls, name)) != "local"
    }
    methods["generate"] = _generate(getattr(cls, "generate", None))
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (Parallelized, cls), {**names, **{n: m for n, m in methods.items() if m is not None}})


def _forwarded(name: str, original: Callable) -> Callable:
    """A method that runs on the workers; it keeps the original's signature, which `generate` and pipelines inspect."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return dispatcher_of(self).call(self, "", name, args, kwargs)

    return call


def _generate(original: Callable | None) -> Callable | None:
    if original is None:
        return None

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return dispatcher_of(self).generate(self, original, args, kwargs)

    return generate


def _refused(name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ParallelError(_refusal(self, f"{name}()", f"it {REFUSED[name]}"))

    return refuse


def _refusal(model: Any, what: str, why: str) -> str:
    return f"{type(model).__name__} is parallelized, which rules out {what}: {why}. Call deparallelize() first"


class _Nodes(Mapping[str, Node]):
    """Where to read each tensor of a deployment, worked out when it is asked for."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def __getitem__(self, name: str) -> Node:
        return self._deployment.node(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._deployment.plan.tensors)

    def __len__(self) -> int:
        return len(self._deployment.plan.tensors)


class _SubmoduleForward:
    """Takes the place of a sub-module's forward: `model.get_encoder()(…)` runs on the workers too."""

    def __init__(self, model: weakref.ref[nn.Module], path: str, plan: ShardPlan) -> None:
        self._model = model
        self._path = path
        self._block = next((block for block in plan.blocks if path.startswith(f"{block}.")), None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if self._block is not None:
            raise ParallelError(
                f"{self._path} lies within {self._block}, which is cut: alone it would give a part of its result."
                f" Call {self._block} or something above it, or deparallelize() first"
            )
        return dispatcher_of(model).call(model, self._path, "forward", args, kwargs)
