"""Defines the methods of a parallelized model. The model stays the same object with the same class name; the workers
do the computation."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import operator
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from transformers.generation.streamers import BaseStreamer

from parallelformers_ng.checkpoint.identity import original_of
from parallelformers_ng.checkpoint.lazy import RemoteTensor
from parallelformers_ng.checkpoint.nodes import FetchedLeaf
from parallelformers_ng.checkpoint.store import names_of_each, place
from parallelformers_ng.errors import NotParallelizedError
from parallelformers_ng.model import remote_tree
from parallelformers_ng.model.calls import Calls
from parallelformers_ng.model.deployment import Deployment
from parallelformers_ng.model.marks import REMOTE, hf_device_map
from parallelformers_ng.model.methods import is_streamer, options_of_class
from parallelformers_ng.model.remote_module import RemoteModule, remote_of
from parallelformers_ng.runtime.limits import Cancellation, cancelled_by
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensors import get_tensor
from parallelformers_ng.worker.memory import device_totals

_THREADS = ThreadPoolExecutor(1024, thread_name_prefix="agenerate")  # threads start on demand and are kept


class _Watched(BaseStreamer):
    """A streamer that ends a call of `agenerate` at the first token after the call was cancelled."""

    def __init__(self, streamer: Any, cancellation: Cancellation) -> None:
        self._streamer = streamer
        self._cancellation = cancellation

    def put(self, value: torch.Tensor) -> None:
        self._cancellation.check()
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


class Parallelized(RemoteModule):
    """Mixin that comes before the model's own class while the model is parallelized."""

    @property
    def device(self) -> torch.device:
        """Device for inputs, always CPU. The workers move inputs to their devices; outputs come back to the CPU."""
        return torch.device("cpu")

    hf_device_map = property(hf_device_map)

    def memory_allocated(self) -> dict[str, int]:
        """Return the bytes of weights (CPU) or of all tensors (CUDA) on each device: `{"cuda:0": bytes, …}`.

        Raises:
            GroupError: the workers failed or have ended.
        """
        return deployment_of(self).memory("allocated")

    def memory_reserved(self) -> dict[str, int]:
        """Return device name → bytes that each worker occupies: its proportional set size on CPU, torch's memory pool
        on CUDA.

        Raises:
            GroupError: the workers failed or have ended.
        """
        return deployment_of(self).memory("reserved")

    memory_cached = memory_reserved
    memory_chached = memory_reserved  # the README of Parallelformers has this misspelled name

    def memory_summary(self, detail: bool = True) -> str:
        """Return the memory of every rank as text: one table per rank, or one line if `detail` is false.

        With `detail`, a line for each NVIDIA device of this machine follows.

        Raises:
            GroupError: the workers failed, have ended, or did not answer in time.
        """
        ranks = deployment_of(self).memory("table" if detail else "line").values()
        return "\n".join(ranks) + (device_totals() if detail else "")

    @property
    def shard_plan(self) -> ShardPlan:
        """The plan of the model."""
        return deployment_of(self).plan

    def accept_lost_state(self) -> None:
        """Let calls go on after a `StateLostError`, with the values that this process has."""
        deployment_of(self).state.accept()

    async def agenerate(self, inputs: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Await `generate`, which runs in a thread of its own with a copy of this task's context variables.

        If the task is cancelled, the call on the workers ends within one decode step. A beam search cannot be
        cancelled: the task ends at once, and the workers finish the search.

        Args:
            inputs: token ids, int64 `[batch, tokens]`, the same as in `generate`.
            **kwargs: arguments of `generate`, also `seed=` (64 bits) and `timeout=` (seconds). A streamer is called in
                a thread other than the event loop's.

        Returns:
            Result of `generate`: token ids, int64 `[batch, tokens]`, or a `ModelOutput`, on CPU.

        Raises:
            CancelledError: the task was cancelled.
            ParallelError: an argument has a wrong value, or a hook or a change of the model cannot reach the workers.
            BatchingError: the call exceeds a limit of the batch, too many calls are waiting, or the batch failed.
            StaleCacheError: the workers with a cache of the arguments have ended.
            GroupError: the workers failed or have ended, or the deadline has passed. An error that a worker raised also
                has its original type.
            Exception: another error of `generate`, or an error of the streamer.
        """
        model: Any = self
        cancellation = Cancellation()
        config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
        # Cancel through a streamer if `generate` accepts a streamer; beam search does not.
        takes = inspect.signature(type(model).generate).parameters.values()
        takes_streamer = any(each.name == "streamer" or each.kind is each.VAR_KEYWORD for each in takes)
        beams = kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1
        own_streamer = "streamer" in options_of_class(type(self)._whole_class.generate)  # type: ignore[attr-defined]
        if takes_streamer and beams == 1 and (not own_streamer or is_streamer(kwargs.get("streamer"))):
            kwargs["streamer"] = _Watched(kwargs.get("streamer"), cancellation)

        def run() -> Any:
            with cancelled_by(cancellation):
                return model.generate(*(() if inputs is None else (inputs,)), **kwargs)

        with remote_of(self).calls.with_adapters():
            context = contextvars.copy_context()
        try:
            return await asyncio.get_running_loop().run_in_executor(_THREADS, context.run, run)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    def deparallelize(self) -> Any:
        """Stop the workers, gather the weights on CPU, and make the model an ordinary one again; return the model.

        A second call only returns the model.

        Raises:
            WrongProcessError: this is a forked process.
            GroupError: only the workers have the weights, and the workers failed or have ended. Or a group from
                `start_group` failed to drop the model. The model stays parallelized.
            CheckpointError: a checkpoint file is damaged, or has changed. The model stays parallelized.
        """
        deployment = deployment_of(self)
        remote_tree.leave(self, lambda: deployment.gather(self))
        deployment.restore()
        vars(self)[_END] = Ended(self)
        return self

    def cpu(self) -> Any:
        """End the parallelization with a warning; return the model, which is then on CPU.

        Raises:
            GroupError, CheckpointError: see `deparallelize`.
        """
        return self._ended_by("cpu")

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        """End the parallelization with a warning, move the whole model to one CUDA device, and return the model.

        Raises:
            RuntimeError, AssertionError: torch's error without a CUDA device. The model stays parallelized.
            GroupError, CheckpointError: see `deparallelize`.
            torch.OutOfMemoryError: the device is too small. The parallelization has ended.
        """
        self._changed_by(lambda module: module.cuda(*args, **kwargs))  # raises if no CUDA device exists
        return self._ended_by("cuda").cuda(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same as `nn.Module.to`. If the weights' data type or device changes, end the parallelization first.

        The end of the parallelization emits a warning.

        Raises:
            GroupError, CheckpointError: see `deparallelize`.
            Exception: an error of `nn.Module.to`, see also `cuda`.
        """
        if not self._changed_by(lambda module: module.to(*args, **kwargs)):
            return self
        return self._ended_by("to").to(*args, **kwargs)

    def _ended_by(self, method: str) -> Any:
        warnings.warn(
            f"{type(self).__name__}.{method}() ends the parallelization: the workers stop, and the whole model is in"
            " this process. To keep the parallelization, remove the call; to end it without this warning, call"
            " deparallelize()",
            stacklevel=3,
        )
        return self.deparallelize()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.deparallelize()

    def __repr__(self) -> str:
        """Return one line for a REPL. `print(model)` shows all modules, and how each module is cut."""
        return f"{type(self).__name__}({self.extra_repr().removeprefix('# ')})"

    def __str__(self) -> str:
        return super().__repr__()

    def extra_repr(self) -> str:
        plan, devices = deployment_of(self).plan, deployment_of(self).device_names
        return (
            f"# parallelized over {len(devices)} workers ({', '.join(devices)}) by {plan.policy}"
            f" ({plan.source}); {plan.cut_share:.0%} of what can be cut is cut"
        )


def enter(model: nn.Module, calls: Calls) -> None:
    """Make `model` a parallelized model, in place."""
    deployment = calls.deployment
    for names in names_of_each(model, deployment.plan):
        tensor = get_tensor(model, names[0], deployment.plan.tensors[names[0]].is_buffer)
        fetch = functools.partial(_fetch, weakref.ref(model), deployment, names[0])
        weight = FetchedLeaf(tuple(tensor.shape), tensor.dtype, fetch, names[0])
        place(model, names, deployment.plan, RemoteTensor(weight, tensor.stride()))
        if (original := original_of(tensor)) is not None and original.nbytes:
            calls.outside.shared[names[0]] = original
    remote_tree.enter(model, calls, Parallelized)


def _fetch(reference: weakref.ref[nn.Module], deployment: Deployment, name: str) -> torch.Tensor:
    if not deployment.ended:
        return deployment.read(deployment.plan.tensors[name])
    model = reference()
    if model is None or is_parallelized(model):
        raise NotParallelizedError(f"the parallelization of {name} has ended; read it from the model")
    return get_tensor(model, name, deployment.plan.tensors[name].is_buffer).detach()


class Ended(weakref.ref):
    """Replaces the method `deparallelize` of a model that is no longer parallelized: a call only returns the model.

    The object is pickled as code of the standard library, so that the model can be loaded without this package.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Ended:
        model = self()
        return Ended(memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (operator.itemgetter(0), (self(),))


_END = Parallelized.deparallelize.__name__


def forget_end(model: object) -> None:
    """Remove the `Ended` object from a model, so that `deparallelize` works after the next `parallelize`."""
    if isinstance(model, nn.Module):
        vars(model).pop(_END, None)


def is_parallelized(model: object) -> bool:
    return isinstance(model, Parallelized)


def deployment_of(model: object) -> Deployment:
    """Return the `Deployment` of a parallelized model, or of the model inside a peft wrapper."""
    remote = getattr(model, "__dict__", {}).get(REMOTE)
    if remote is None or remote.path:
        raise NotParallelizedError(f"{type(model).__name__} is not parallelized")
    return remote.calls.deployment
