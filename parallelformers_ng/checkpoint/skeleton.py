"""The live module tree without its weights, as bytes: what a worker builds its share from.

Pickled by value, tensors as references, rather than rebuilt by `cls(config)`: edits of the user, adapters and classes
defined in a notebook come along.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.utils import output_capturing
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.hooks.pickling import is_of_library
from parallelformers_ng.hooks.registry import check
from parallelformers_ng.live_code.packing import CodeChanges, by_value
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.quantized import quantize_modules
from parallelformers_ng.sharding.tensors import get_tensor
from parallelformers_ng.wire.by_value import ReferencePickler, ReferenceUnpickler


class Skeleton:
    """A model's modules and its plan. Its own pickle is a few hundred bytes per layer, whatever the model weighs."""

    def __init__(self, model: bytes, plan: bytes) -> None:
        self.model = model
        self.plan = plan
        self.code: CodeChanges | None = None
        """What ranks have to change of the code that they import, before they build the model."""

    @classmethod
    def of(cls, model: nn.Module, plan: ShardPlan, modules: Collection[str] = ()) -> Skeleton:
        """Take the skeleton of `model`.

        Args:
            model: the model, on any device.
            plan: how it is cut.
            modules: names of the modules whose code travels by value.

        Raises:
            UnsupportedModelError: some part of the model cannot be pickled; the message says which.
            ParallelError: it has a hook that a cut model cannot have.
        """
        check(model, plan)
        buffer = io.BytesIO()
        names: dict[int, str] = {}
        for name, tensor in plan.tensors.items():
            names.setdefault(id(get_tensor(model, name, tensor.is_buffer)), name)

        def reference(obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and id(obj) in names:
                return names[id(obj)], tuple(obj.shape), obj.dtype, isinstance(obj, nn.Parameter)
            return None

        try:
            with by_value(modules):
                _SkeletonPickler(buffer, reference).dump(model)
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be sent to the workers: {error}. Something attached to it (a lock,"
                " an open file) cannot be copied; remove it before parallelize"
            ) from error
        return cls(
            buffer.getvalue(), cloudpickle.dumps(replace(plan, selection=None))
        )  # apart: its thousands of ranges are no tensors

    def build(self) -> tuple[nn.Module, ShardPlan]:
        """Return the module tree as ranks have it, with every tensor on `meta`, and the plan of what they hold."""
        tensors: dict[str, torch.Tensor] = {}

        def resolve(reference: Any) -> torch.Tensor:
            name, shape, dtype, is_parameter = reference
            if name not in tensors:
                tensor = torch.empty(shape, dtype=dtype, device="meta")
                tensors[name] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            return tensors[name]

        model, plan = ReferenceUnpickler(self.model, resolve).load(), pickle.loads(self.plan)
        quantize_modules(model, plan)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                # What a model's constructor does besides building modules: its recorders of hidden states and
                # attentions.
                # Up to transformers 5.22 they are those of a class.
                key = str(type(module)) if type(_CAN_RECORD_REGISTRY) is dict else module
                _CAN_RECORD_REGISTRY[key] = module._can_record_outputs
                module.__dict__.pop("_output_capturing_hooks_installed", None)
        return model, plan.held


class _SkeletonPickler(ReferencePickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, nn.Module):
            return super().reducer_override(obj)
        # torch gives a parametrized module (weight norm) a class of its own that refuses to be pickled.
        if parametrize.is_parametrized(obj):
            plain = parametrize.type_before_parametrizations(obj)
            return plain.__new__, (plain,), {**vars(obj), **_own_hooks(obj)}, None, None, _parametrize_again
        reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return super().reducer_override(obj)
        return (*reduced[:2], {**reduced[2], **_own_hooks(obj)}, *reduced[3:])


def _own_hooks(module: nn.Module) -> dict[str, Any]:
    """Replace the tables of forward hooks by tables of hooks that belong to the model's computation. The caller's
    hooks go with each call; each copy of a model installs transformers' recording hooks itself."""
    return {
        table: OrderedDict(
            (number, hook)
            for number, hook in vars(module)[table].items()
            if is_of_library(hook) and getattr(hook, "__module__", "") != output_capturing.__name__
        )
        for table in ("_forward_hooks", "_forward_pre_hooks")
    }


def _parametrize_again(module: nn.Module, state: dict[str, Any]) -> None:
    """Undo the pickler's work: set the attributes, then the class that computes the parametrized ones."""
    vars(module).update(state)
    parametrize._inject_new_class(module)
    for name in state["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)
