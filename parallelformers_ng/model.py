"""What a parallelized model can do. The model keeps its class, its name and its place in memory; its work moves to the
workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelformers_ng.deployment import Deployment
from parallelformers_ng.errors import NotParallelizedError, ParallelError
from parallelformers_ng.memory import detail_report, device_totals, simple_report
from parallelformers_ng.sharding.plan import ShardPlan

_DEPLOYMENT = "_parallelformers_ng_deployment"


class Parallelized:
    """Mixed in before the model's own class while it is parallelized, so that `isinstance` and `super()` hold."""

    def _run(self, method: str, args: tuple, kwargs: dict) -> Any:
        deployment = deployment_of(self)
        rng = torch.get_rng_state()
        output, after = deployment.call("run", method, args, kwargs, self.training, rng)  # type: ignore[attr-defined]
        if after is not None:
            torch.set_rng_state(after)
        return output

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

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise ParallelError(
            f"{type(self).__name__} is parallelized: its weights are with the workers and cannot be cast or moved one by"
            " one. Pass dtype= to parallelize, or call deparallelize() first"
        )

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.deparallelize()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParallelError(
            f"{type(self).__name__} is parallelized and cannot be pickled or copied: its weights are with the workers."
            " Call deparallelize() first"
        )


def enter(model: nn.Module, deployment: Deployment) -> None:
    """Make `model` a parallelized one, in place."""
    object.__setattr__(model, _DEPLOYMENT, deployment)
    model.__class__ = _parallelized_class(type(model))


def is_parallelized(model: object) -> bool:
    return isinstance(model, Parallelized)


def deployment_of(model: object) -> Deployment:
    """The deployment behind a parallelized model.

    Raises:
        NotParallelizedError: there is none.
    """
    deployment = getattr(model, _DEPLOYMENT, None)
    if deployment is None:
        raise NotParallelizedError(f"{type(model).__name__} is not parallelized")
    return deployment


def _restore_class(model: Any) -> Any:
    object.__delattr__(model, _DEPLOYMENT)
    model.__class__ = type(model).__mro__[2]
    return model


@functools.cache
def _parallelized_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `cls` with its name and module, so that what it saves and prints names the original."""
    forwarded = {name: _forwarding(name, getattr(cls, name)) for name in ("forward", "generate") if hasattr(cls, name)}
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (Parallelized, cls), {**names, **forwarded})


def _forwarding(name: str, original: Callable) -> Callable:
    """A method that runs on the workers; it keeps the original's signature, which `generate` and pipelines inspect."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(name, args, kwargs)

    return call
