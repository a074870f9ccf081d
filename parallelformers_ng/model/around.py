"""Adapts peft's wrapper objects to a parallelized model. The wrappers stay in the caller's process: calls of the inner
model go to the workers, and changes of the inner model's weights are refused."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from parallelformers_ng.checkpoint.lazy import values
from parallelformers_ng.errors import CheckpointError, ParallelError, UnsupportedModelError
from parallelformers_ng.model.marks import REMOTE
from parallelformers_ng.model.methods import REFUSED, REFUSED_OF_PEFT, SWITCHES
from parallelformers_ng.model.remote_module import refusal, remote_of, replaced
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

_KINDS = ("LORA", "IA3")
_NO_ADAPTER = "__base__"  # peft's name for a row without an adapter


def within(model: Any) -> tuple[Any, list[nn.Module]]:
    """Return the model inside its peft wrappers, and a list of the wrappers, which is empty without peft."""
    if not hasattr(type(model), "get_base_model"):
        return model, []
    for name, config in model.peft_config.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind not in _KINDS:
            raise UnsupportedModelError(
                f"the adapter {name!r} of {type(model).__name__} has the type {kind}; supported types are"
                f" {' and '.join(_KINDS)}. Remove the adapter, or pass the model that merge_and_unload() returns"
            )
    return model.get_base_model(), [model, model.base_model]


def with_peft_adapters(model: Any, directories: Mapping[str, str]) -> Any:
    """Wrap `model` with peft, and load adapters from `directories` (name → directory); the first one is active."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ParallelError(
            f"{', '.join(directories.values())} is an adapter, and peft, which reads it, is not installed:"
            " pip install peft"
        ) from error
    around: Any = None
    for name, directory in directories.items():
        try:
            if around is None:
                around = PeftModel.from_pretrained(model, directory, name, low_cpu_mem_usage=True)
            loaded = around.load_adapter(directory, name, low_cpu_mem_usage=True)
        except (ValueError, OSError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
            raise_if_of_handler(error)
            raise CheckpointError(
                f"the adapter {name!r} of {directory} cannot be loaded into {type(model).__name__}: {error}"
            ) from error
        if mismatched := (*loaded.missing_keys, *loaded.unexpected_keys):
            raise CheckpointError(
                f"the adapter {name!r} of {directory} does not fit this {type(model).__name__}: {len(mismatched)}"
                f" tensors are missing or not part of the model, the first is {mismatched[0]}"
            )
    return around


def surround(around: list[nn.Module], model: nn.Module) -> None:
    """Replace the classes of the peft wrappers around `model`, so that the wrappers use the workers.

    Methods of the wrappers that add, remove or change weights then raise ParallelError. The function
    `remote_tree.leave` restores the classes.
    """
    remote = remote_of(model)
    remote.around = around
    for each in around:
        vars(each)[REMOTE] = remote
        cls: Any = type(each)
        each.__class__ = _surrounding(cls)


@functools.cache
def _surrounding(cls: Any) -> Any:
    members: dict[str, Any] = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {"__enter__": lambda self: self, "__exit__": _end, "_whole_class": cls}
    places = dict.fromkeys((*REFUSED, *REFUSED_OF_PEFT), "refused") | dict.fromkeys(SWITCHES, "switched")
    for name, place in places.items():
        if hasattr(cls, name) and not hasattr(nn.Module, name):
            members[name] = replaced(place, name, getattr(cls, name))
    if hasattr(cls, "_enable_peft_forward_hooks") and hasattr(cls, "get_base_model"):
        members |= {"_enable_peft_forward_hooks": _with_names, "agenerate": _agenerate}
    if hasattr(cls, "save_pretrained"):
        members["save_pretrained"] = _saving(cls.save_pretrained)
    return type(cls.__name__, (cls,), members)


def _end(self: Any, *_: object) -> None:
    self.deparallelize()


@contextlib.contextmanager
def _with_names(self: Any, *_: Any, adapter_names: list[str] | None = None, **__: Any) -> Iterator[None]:
    """Replace peft's `_enable_peft_forward_hooks`: run a call of `forward` or `generate` with the named adapter."""
    if adapter_names is None:
        yield
        return
    names = sorted(set(adapter_names))
    if unknown_names := set(names) - {*self.peft_config, _NO_ADAPTER}:
        raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(sorted(unknown_names))}")
    if len(names) > 1:
        operation = f"adapter_names={names}"
        raise ParallelError(
            refusal(self, operation, "all rows of a batch run with one adapter; make a call per adapter")
        )
    adapters = remote_of(self).calls.adapters
    assert adapters is not None, "peft wraps no model without adapter layers"
    with adapters.of_call(adapters.active().with_one(None if names == [_NO_ADAPTER] else names[0])):
        yield


async def _agenerate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Await the inner model's `agenerate`, with support for `adapter_names`."""
    with self._enable_peft_forward_hooks(adapter_names=kwargs.pop("adapter_names", None)):
        return await remote_of(self).model.agenerate(*args, **kwargs)


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap peft's `save_pretrained`, so that it fetches adapter weights from the workers."""

    @functools.wraps(original)
    def save(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        selected = kwargs.get("selected_adapters") or self.peft_config
        # `original` raises ValueError for unknown names.
        names = [name for name in selected if name in self.peft_config]
        kwargs["state_dict"] = state_of_adapters(self, names, kwargs.get("save_embedding_layers", "auto"))
        return original(self, save_directory, *args, **kwargs)

    return save


def state_of_adapters(model: Any, names: Sequence[str], embeddings: bool | str = "auto") -> dict[str, torch.Tensor]:
    """Return the model's state dict, in which only the tensors that peft will save are fetched from the workers."""
    from peft import get_peft_model_state_dict  # a model with adapters needs peft, so peft is installed

    state = model.state_dict(keep_vars=True)
    written = set[int]()
    for name in names:
        chosen = get_peft_model_state_dict(model, state, name, save_embedding_layers=embeddings)
        written.update(map(id, chosen.values()))
    return {name: values(tensor).detach() if id(tensor) in written else tensor for name, tensor in state.items()}
