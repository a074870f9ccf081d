"""Pickles a model's modules without the weights, and builds the modules of a worker from that pickle.

The modules are pickled by value, with names instead of tensors. Workers do not call `cls(config)`, so changes of the
user, adapters, and classes from a notebook reach the workers too.
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
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler


class Skeleton:
    """The pickled modules and the pickled plan of a model, without weights.

    A Llama layer has about 2 KB of pickled modules, and 2 KB of pickled plan for 2 ranks or 4 KB for 8 ranks.
    """

    def __init__(self, model: bytes, plan: bytes) -> None:
        self.model = model
        self.plan = plan
        # Changes to modules' code that a rank makes after its imports, before it builds the model; None for no changes.
        self.code: CodeChanges | None = None

    @classmethod
    def of(cls, model: nn.Module, plan: ShardPlan, modules: Collection[str] = ()) -> Skeleton:
        """Make the skeleton of a model.

        Args:
            modules: names of the Python modules whose code is pickled by value.
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
            raise_if_of_handler(error)
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be sent to the workers: {error}. An attribute of the model (a lock,"
                " an open file) cannot be copied; remove that attribute before parallelize"
            ) from error
        # The plan is pickled by plain cloudpickle, which is faster and enough, because a plan contains no tensors.
        return cls(buffer.getvalue(), cloudpickle.dumps(replace(plan, selection=None)))

    def build(self) -> tuple[nn.Module, ShardPlan]:
        """Return the model for a rank, with every tensor on `meta`, and the plan of the tensors that ranks hold.

        Unpickling imports modules and runs code of the model. The method also registers with transformers how to record
        the model's hidden states and attentions.
        """
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
                # Unpickling skips the constructor, which registers how to record hidden states and attentions. Up to
                # transformers 5.22, the key of the registry is the class.
                key = str(type(module)) if type(_CAN_RECORD_REGISTRY) is dict else module
                _CAN_RECORD_REGISTRY[key] = module._can_record_outputs
                module.__dict__.pop("_output_capturing_hooks_installed", None)
        return model, plan.as_stored


class _SkeletonPickler(ReferencePickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, nn.Module):
            return super().reducer_override(obj)
        # torch gives each parametrized module (weight norm) a new class, which pickle does not find by its name.
        if parametrize.is_parametrized(obj):
            plain = parametrize.type_before_parametrizations(obj)
            return plain.__new__, (plain,), {**vars(obj), **_own_hooks(obj)}, None, None, _parametrize_again
        reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return super().reducer_override(obj)
        return (*reduced[:2], {**reduced[2], **_own_hooks(obj)}, *reduced[3:])


def _own_hooks(module: nn.Module) -> dict[str, Any]:
    """Return a module's forward hooks and forward pre-hooks that libraries have set; others are not pickled.

    The user's hooks are sent with each call. transformers' hooks that record hidden states are installed anew.
    """
    return {
        table: OrderedDict(
            (number, hook)
            for number, hook in vars(module)[table].items()
            if is_of_library(hook) and getattr(hook, "__module__", "") != output_capturing.__name__
        )
        for table in ("_forward_hooks", "_forward_pre_hooks")
    }


def _parametrize_again(module: nn.Module, state: dict[str, Any]) -> None:
    """Set the pickled attributes of a parametrized module, and give it the class that torch makes for such a module."""
    vars(module).update(state)
    parametrize._inject_new_class(module)
    for name in state["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)
