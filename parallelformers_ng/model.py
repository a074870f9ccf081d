"""What a parallelized model can do. The model keeps its class, its name and its place in memory; its work moves to the
workers."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from parallelformers_ng import remote_tree
from parallelformers_ng.checkpoint.remote_tensor import RemoteTensor, RemoteWeight
from parallelformers_ng.checkpoint.store import names_of_each, place
from parallelformers_ng.compiling import StaticSteps
from parallelformers_ng.deployment import Deployment
from parallelformers_ng.dispatch import Dispatcher
from parallelformers_ng.errors import NotParallelizedError
from parallelformers_ng.memory import detail_report, device_totals, simple_report
from parallelformers_ng.remote_module import RemoteModule, remote_of
from parallelformers_ng.sharding.inject import get_tensor
from parallelformers_ng.sharding.plan import ShardPlan


class Parallelized(RemoteModule):
    """Mixed in before the model's own class while it is parallelized."""

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
        deployment_of(self).gather(self)
        remote_tree.leave(self)
        return self

    def cpu(self) -> Any:
        """End the parallelization; the model is then on CPU."""
        return self.deparallelize()

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        """End the parallelization and move the whole model to one CUDA device."""
        return self.deparallelize().cuda(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """End the parallelization, then as `nn.Module.to`."""
        return self.deparallelize().to(*args, **kwargs)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.deparallelize()

    def extra_repr(self) -> str:
        deployment = deployment_of(self)
        plan = deployment.plan
        return (
            f"# parallelized over {plan.world_size} workers ({', '.join(deployment.device_names)}) by {plan.policy}"
            f" ({plan.source}); {plan.cut_share:.0%} of what can be cut is cut"
        )


def enter(model: nn.Module, deployment: Deployment, seed: int | None = None, steps: StaticSteps | None = None) -> None:
    """Make `model` a parallelized one, in place."""
    dispatcher = Dispatcher(model, deployment, seed, steps)
    remote_tree.enter(model, dispatcher, Parallelized)
    for names in names_of_each(model, deployment.plan):
        tensor = get_tensor(model, names[0], deployment.plan.tensors[names[0]].is_buffer)
        weight = RemoteWeight(tuple(tensor.shape), tensor.dtype, names[0], _Fetch(model, deployment, names[0]))
        place(model, names, deployment.plan, RemoteTensor(weight, tensor.stride()))


class _Fetch:
    """Puts one weight together: from the workers, and once the parallelization has ended, from the model."""

    def __init__(self, model: nn.Module, deployment: Deployment, name: str) -> None:
        self._model = weakref.ref(model)
        self._deployment = deployment
        self._name = name

    def __call__(self) -> torch.Tensor:
        if not self._deployment.ended:
            return self._deployment.read(self._name)
        model = self._model()
        if model is None or is_parallelized(model):
            raise NotParallelizedError(f"{self._name} is of a parallelization that has ended; take it from the model")
        return get_tensor(model, self._name, self._deployment.plan.tensors[self._name].is_buffer).detach()


def is_parallelized(model: object) -> bool:
    return isinstance(model, Parallelized)


def dispatcher_of(model: object) -> Dispatcher:
    """What carries a parallelized model's calls.

    Raises:
        NotParallelizedError: the model is not parallelized.
    """
    if not isinstance(model, Parallelized):
        raise NotParallelizedError(f"{type(model).__name__} is not parallelized")
    return remote_of(model).dispatcher


def deployment_of(model: object) -> Deployment:
    """The workers and weights behind a parallelized model."""
    return dispatcher_of(model).deployment
