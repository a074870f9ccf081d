"""Sends assistants to the workers: small models that propose tokens in `generate(assistant_model=…)`.

The ranks of a model keep the latest assistant. An assistant is sharded over the same ranks, by its own policy. The
model checks all proposals, so an outdated assistant would change the speed of a greedy generation, and not its tokens.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.planning import make_plan
from parallelformers_ng.checkpoint.loading import Checkpoint
from parallelformers_ng.checkpoint.progress import progress_bar
from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.checkpoint.store import ShardStore, hand_over
from parallelformers_ng.errors import GroupError, NotPortableError, ParallelError
from parallelformers_ng.hooks.registry import hooks_of
from parallelformers_ng.model.caller_state import Edits
from parallelformers_ng.model.groups import StoredModel
from parallelformers_ng.model.live_code import LiveCode
from parallelformers_ng.model.marks import REMOTE
from parallelformers_ng.options import FitOptions
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.limits import turn
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler
from parallelformers_ng.worker.call import Assistance

_OF_THE_MODEL = ("Gemma4Assistant", "Gemma4UnifiedAssistant")
"""Beginnings of the names of classes whose models compute with the model's own keys, values and embeddings."""

_PLAIN = (int, float, str, type(None))


class Assistants:
    """Sends assistants (draft models) to one group of workers, which keeps the latest one."""

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self._latest: _Assistant | None = None
        # Restart count of the workers that got an assistant, and that assistant.
        self._sent: tuple[int, _Assistant] | None = None

    @contextlib.contextmanager
    def turn(
        self, ready: tuple[WorkerGroup, int, float], assistant: Any, arguments: dict[str, Any], show_progress: bool
    ) -> Iterator[Assistance]:
        """Wait for other calls with an assistant, send the assistant to the ranks, and yield its replacement.

        Weights are sent only if the ranks do not have this assistant yet, or if it has changed.
        """
        group, incarnation, end = ready
        _refuse(assistant, arguments, group)
        late = "calls with an assistant run one after another; earlier calls ended too late"
        with turn(self._turn, end, late):
            latest = self._latest
            if latest is None or not latest.is_still(assistant):
                self._latest = latest = None  # frees the earlier weights before new ones are stored
                self._latest = latest = _found(assistant, group) or _made(assistant, group, show_progress)
            if self._sent != (incarnation, latest):
                self._sent = None  # after an error or Ctrl-C below, the ranks may have no usable assistant
                group.call("assistant.build", latest.stored.skeleton, deadline=end)
                latest.stored.load(group, part="assistant.")
                self._sent = incarnation, latest
            yield Assistance(assistant.generation_config)


class _Assistant:
    """An assistant with its stored weights, and with the state of the model when the weights were stored."""

    def __init__(self, model: nn.Module, stored: StoredModel, edits: Edits) -> None:
        self._model = weakref.ref(model)
        self._edits = edits
        self._parts = [(weakref.ref(part), state) for part, state in _parts(model)]
        self.stored = stored

    def is_still(self, assistant: Any) -> bool:
        """Whether `assistant` is the same model with unchanged weights, modules, configuration and code."""
        known = [(id(part()), state) for part, state in self._parts]
        present = [(id(part), state) for part, state in _parts(assistant)]
        return self._model() is assistant and known == present and not self._edits.has_changes()


def _parts(model: Any) -> list[tuple[Any, Any]]:
    """Return all tensors of a model with their version counters (0 for inference tensors), and all modules with their
    attributes that are numbers, strings or None."""
    tensors = [*model.parameters(), *model.buffers()]
    modules = [
        (module, {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)})
        for module in model.modules()
    ]
    return [*((tensor, 0 if tensor.is_inference() else tensor._version) for tensor in tensors), *modules]


def _refuse(assistant: Any, arguments: dict[str, Any], group: WorkerGroup) -> None:
    """Raise NotPortableError if a call with this assistant can run only in this process, and not on the workers."""
    config = arguments.get("generation_config")
    name = type(assistant).__name__
    if not isinstance(assistant, PreTrainedModel):
        raise NotPortableError(f"assistant_model is a {name}, and not a PreTrainedModel")
    hooks = [hook for path, module in assistant.named_modules() for hook in hooks_of(path, module)]
    reasons = {
        "it computes with the model's own keys and values": name.startswith(_OF_THE_MODEL),
        "its tokenizer differs from the model's": arguments.get("assistant_tokenizer") is not None,
        "its modules have forward hooks": bool(hooks),
        "it is in training mode": any(module.training for module in assistant.modules()),
        "speculation_type is set": (
            (arguments.get("speculation_type"), getattr(config, "speculation_type", None)) != (None, None)
        ),
        "its weights cannot be sent to other hosts": group.hosts is not None and not group.hosts.are_here,
        "it has adapters": getattr(assistant, "_hf_peft_config_loaded", False),
    }
    _raise_first(f"the assistant {name} cannot run on the workers", reasons)


def _raise_first(refusal: str, reasons: dict[str, bool]) -> None:
    for reason, is_so in reasons.items():
        if is_so:
            raise NotPortableError(f"{refusal}: {reason}")


def _found(assistant: Any, group: WorkerGroup) -> _Assistant | None:
    """Use the stored weights of an assistant that is parallelized itself; return None for an ordinary model."""
    remote = vars(assistant).get(REMOTE)
    if remote is None:
        return None
    deployment, edits = remote.calls.deployment, remote.calls.edits
    stored: StoredModel | None = deployment.stored
    reasons = {
        "only its own workers have its weights": stored is None,
        f"it has {deployment.plan.world_size} workers, and the model has {group.world_size}": (
            deployment.plan.world_size != group.world_size
        ),
        "it is offloaded, or divided into stages": (
            deployment.plan.tiers is not None or deployment.plan.strategy != "tensor"
        ),
        "it was changed after it was parallelized": edits.has_changes(),
        "its code was changed in this process": stored is not None and stored.skeleton.code is not None,
    }
    _raise_first(f"the assistant {type(assistant).__name__} runs on its own workers", reasons)
    assert stored is not None
    return _Assistant(assistant, stored, edits)


def _made(assistant: Any, group: WorkerGroup, show_progress: bool) -> _Assistant:
    """Make a plan of an ordinary assistant for the group, and copy its shards to shared memory."""
    name = type(assistant).__name__
    try:
        plan = make_plan(assistant, group.world_size, None, None, FitOptions())
        code = LiveCode(assistant, plan)
        if code.compare(functools.partial(group.call, "differences")) is not None:
            raise NotPortableError("its code was changed in this process")
        skeleton = Skeleton.of(assistant, plan, code.by_value)
        store = ShardStore(plan)
        with progress_bar(f"sending {name}", plan.bytes_whole, show_progress) as advance:
            hand_over(assistant, store, plan.tensors, advance, copy=True)
    except (ParallelError, OSError) as error:
        raise_if_of_handler(error)
        if isinstance(error, GroupError) and not isinstance(error, NotPortableError):
            raise
        raise NotPortableError(f"the assistant {name} cannot run on the workers: {error}") from error
    return _Assistant(assistant, StoredModel(skeleton, plan, store, Checkpoint({})), Edits(assistant, code))
