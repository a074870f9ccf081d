"""The methods of a parallelized model. The model keeps its class, its name and its place in memory; its work moves
to the workers."""

from __future__ import annotations

import functools
import operator
import warnings
import weakref
from typing import Any

import torch
from torch import nn

from parallelformers_ng.checkpoint.lazy import RemoteTensor
from parallelformers_ng.checkpoint.nodes import FetchedLeaf
from parallelformers_ng.checkpoint.store import names_of_each, place
from parallelformers_ng.cuda_graphs.modes import StaticSteps
from parallelformers_ng.errors import NotParallelizedError
from parallelformers_ng.model import remote_tree
from parallelformers_ng.model.awaiting import agenerate
from parallelformers_ng.model.calls import Calls
from parallelformers_ng.model.deployment import Deployment
from parallelformers_ng.model.marks import hf_device_map
from parallelformers_ng.model.remote_module import RemoteModule, conversion, remote_of
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensors import get_tensor
from parallelformers_ng.worker.memory import device_totals


class Parallelized(RemoteModule):
    """Mixed in before the model's own class while it is parallelized."""

    # -- where it is ---------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Return the device for inputs. The workers move them on, and outputs come back here."""
        return torch.device("cpu")

    hf_device_map = property(hf_device_map)

    def memory_allocated(self) -> dict[str, int]:
        """Return bytes of weights (CPU) or of all tensors (CUDA) on each device: `{"cuda:0": bytes, …}`."""
        return deployment_of(self).memory("allocated")

    def memory_reserved(self) -> dict[str, int]:
        """Return bytes that each worker keeps from others: its proportional set size on CPU, torch's pool on CUDA."""
        return deployment_of(self).memory("reserved")

    memory_cached = memory_reserved
    memory_chached = memory_reserved  # the spelling of Parallelformers' README

    def memory_summary(self, detail: bool = True) -> str:
        """Return the memory of every rank as text: a table each, or one line each without `detail`."""
        ranks = deployment_of(self).memory("table" if detail else "line").values()
        return "\n".join(ranks) + (device_totals() if detail else "")

    @property
    def shard_plan(self) -> ShardPlan:
        """The plan that the model was cut by."""
        return deployment_of(self).plan

    async def agenerate(self, inputs: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """`generate`, awaited: the event loop goes on meanwhile. A task that is cancelled ends its call within a step.

        Args:
            inputs: token ids, as in `generate`.
            **kwargs: arguments of `generate`, also `seed=` and `timeout=`. A streamer is called in another thread.
        """
        with remote_of(self).calls.with_adapters():
            return await agenerate(self, {**({} if inputs is None else {"inputs": inputs}), **kwargs})

    # -- the end of it -------------------------------------------------------------------------------------------

    def deparallelize(self) -> Any:
        """Stop the workers, gather the weights on CPU and be an ordinary model again. Returns the model.

        A further call does nothing.
        """
        deployment = deployment_of(self)
        remote_tree.leave(self, lambda: deployment.gather(self))
        deployment.restore()
        vars(self)[_END] = Ended(self)
        return self

    def cpu(self) -> Any:
        """End the parallelization; the model is then on CPU."""
        return self._ended_by("cpu")

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        """End the parallelization and move the whole model to one CUDA device."""
        self._changed_by(conversion(lambda module: module.cuda(*args, **kwargs)))  # raises if there is none
        return self._ended_by("cuda").cuda(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same as `nn.Module.to`; end the parallelization first if the weights' data type or device changes."""
        if not self._changed_by(conversion(lambda module: module.to(*args, **kwargs))):
            return self
        return self._ended_by("to").to(*args, **kwargs)

    def _ended_by(self, method: str) -> Any:
        warnings.warn(
            f"{type(self).__name__}.{method}() ends the parallelization: the workers stop, and the whole model is in"
            " this process. Leave the call out to keep it, or call deparallelize() to end it without this warning",
            stacklevel=3,
        )
        return self.deparallelize()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.deparallelize()

    def __repr__(self) -> str:
        """Return one line, as a REPL shows what a call returns. `print(model)` shows the modules, and their cuts."""
        return f"{type(self).__name__}({self.extra_repr().removeprefix('# ')})"

    def __str__(self) -> str:
        return super().__repr__()

    def extra_repr(self) -> str:
        plan, devices = deployment_of(self).plan, deployment_of(self).device_names
        return (
            f"# parallelized over {len(devices)} workers ({', '.join(devices)}) by {plan.policy}"
            f" ({plan.source}); {plan.cut_share:.0%} of what can be cut is cut"
        )


def enter(
    model: nn.Module,
    deployment: Deployment,
    seed: int | None = None,
    steps: StaticSteps | None = None,
    batching: BatchingOptions | None = None,
    prove_at_once: bool = True,
) -> None:
    """Make `model` a parallelized one, in place."""
    for names in names_of_each(model, deployment.plan):
        tensor = get_tensor(model, names[0], deployment.plan.tensors[names[0]].is_buffer)
        weight = FetchedLeaf(tuple(tensor.shape), tensor.dtype, _Fetch(model, deployment, names[0]), names[0])
        place(model, names, deployment.plan, RemoteTensor(weight, tensor.stride()))
    remote_tree.enter(model, Calls(model, deployment, seed, steps, batching, prove_at_once), Parallelized)


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


class Ended(weakref.ref):
    """`deparallelize` of a model whose parallelization has ended: a call does nothing, and returns the model.

    It is pickled as code of the standard library alone, so that the model can be loaded where this library is not.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Ended:
        model = self()
        return Ended(memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (operator.itemgetter(0), (self(),))


_END = Parallelized.deparallelize.__name__


def forget_end(model: object) -> None:
    """Let a model end a parallelization anew."""
    if isinstance(model, nn.Module):
        vars(model).pop(_END, None)


def is_parallelized(model: object) -> bool:
    return isinstance(model, Parallelized)


def deployment_of(model: object) -> Deployment:
    """Return the workers and weights behind a parallelized model.

    Raises:
        NotParallelizedError: the model is not parallelized.
    """
    if not isinstance(model, Parallelized):
        raise NotParallelizedError(f"{type(model).__name__} is not parallelized")
    return remote_of(model).calls.deployment
