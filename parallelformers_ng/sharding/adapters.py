"""Cuts adapters, the small matrices that peft adds to layers of a model, together with their layers.

    z = x Wᵀ + s · (x Aᵀ) Bᵀ      (LoRA, arXiv:2106.09685)

An adapter layer replaces a layer and contains it. The plan is first made for the model without adapters; then each
adapter layer replaces its layer in the plan. A is cut at the same inputs as W, and B at the same outputs as W. Ranks
exchange the sum of the layer's and the adapter's output once. Trained copies of a module (`modules_to_save`) are cut
like the module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.sharding.layer_uses import reads_parameters
from parallelformers_ng.sharding.layers import LayerPlan, ParallelLayer
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.quantizing import is_stored_quantized, refuse_high_precision
from parallelformers_ng.sharding.stored import StoredInParts
from parallelformers_ng.sharding.tensor_plan import WHOLE, ZERO, Cut, TensorPlan, plans_of_tensors
from parallelformers_ng.sharding.tensors import is_within
from parallelformers_ng.sharding.units import and_above

# Prefix of an adapter tensor's name → for each dimension of the tensor, the dimension of the layer's weight that has
# the same size, and is cut in the same way; "" for a dimension that is never cut, such as the rank of LoRA.
_COUNTS: dict[str, tuple[str, ...]] = {
    "lora_A": ("", "inputs"), "lora_B": ("outputs", ""), "ia3_l": ("outputs", "inputs"),
    "lora_embedding_A": ("", "inputs"), "lora_embedding_B": ("outputs", ""), "lora_magnitude_vector": ("outputs",),
}  # fmt: skip
_VARIANTS = frozenset({"DoraLinearVariant"})
_MERGE = "merge it into the weights first (merge_and_unload)"


class NormOverRanks(ParallelLayer):
    """DoRA's magnitude vector of a layer that is cut by its inputs (arXiv:2402.09353, §4).

    `get_weight_norm` sums squares over the ranks, a collective: the norm of a weight row is ‖w‖² = Σᵣ ‖wᵣ‖².
    """

    def get_weight_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        norm = super().get_weight_norm(*args, **kwargs)  # type: ignore[misc]
        return self.communicator.all_reduce(norm.float().square()).sqrt().to(norm.dtype)


def without_adapters(model: nn.Module) -> nn.Module:
    """Return a copy of the model without adapters that shares the model's tensors and layers.

    A model without adapters is returned itself.
    """
    places = list(_places(model))
    if not places:
        return model
    plain = copy.deepcopy(model, _shared(model))
    for place in places:
        plain.set_submodule(place.path, plain.get_submodule(place.layers[0]))
    return plain


def with_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of a model with adapters in which `layers`, by path, replace the model's quantized layers.

    The copy shares all tensors with the model.
    """
    places, shared = list(_places(model)), _shared(model)
    for path, layer in layers.items():
        place = next((place for place in places if is_within(path, place.path)), None)
        own, *copies = [path] if place is None else place.moved(path)
        if copies:
            raise UnsupportedModelError(
                f"{own} and its trained copy {copies[0]} are quantized; leave that layer out of modules_to_save"
            )
        shared[id(model.get_submodule(own))] = layer
    return copy.deepcopy(model, shared)


def _shared(model: nn.Module) -> dict[int, Any]:
    modules = (module for module in model.modules() if not module._modules)
    return {id(each): each for each in (*model.parameters(), *model.buffers(), *modules)}


def with_adapters(
    plan: ShardPlan, plain: nn.Module, model: nn.Module, dtype: torch.dtype | None, dequantize: bool = False
) -> ShardPlan:
    places = {place.path: place for place in _places(model)}

    def place_of(name: str) -> _Place | None:
        return next((places[path] for path in and_above(name) if path in places), None)

    def moved(name: str) -> list[str]:
        place = place_of(name)
        return [name] if place is None else place.moved(name)

    cuts: dict[str, Cut] = {}
    for name, tensor in plan.tensors.items():
        cuts.update(dict.fromkeys(moved(name), (tensor.shards, tensor.rule)))
    in_parts = {layer.path for layer in plan.layers if layer.cls is StoredInParts}
    with_cuts = {place_of(name) for name, tensor in plan.tensors.items() if not tensor.is_replicated}
    renewed = {layer.path for layer in plan.layers if layer.cls is not None and layer.cls.renews}
    for path, place in places.items():
        if path.rpartition(".")[0] in renewed and reads_parameters(plain, path):
            raise UnsupportedModelError(
                f"the model reads the weight of {path} without its adapter, but ranks would add the adapter; {_MERGE}"
            )
        cuts.update(place.cuts(plan, place in with_cuts and path not in in_parts))
    types = {moved(name)[0]: tensor.dtype for name, tensor in plan.tensors.items()}

    def dtype_of(name: str, tensor: torch.Tensor, _: bool) -> torch.dtype:
        return types.get(name, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)

    added_to = {name for place in places.values() for name in place.parameters} & plan.quantized.keys()
    reasons = dict.fromkeys(sorted(added_to), "an adapter changes this weight")
    misfits = plan.misfits | reasons
    stored = {name: why for name, why in reasons.items() if is_stored_quantized(plain.get_parameter(name))}
    if stored and not dequantize:
        refuse_high_precision(type(model).__name__, stored)
    layers = [new for layer in plan.layers for new in _moved_layer(layer, places.get(layer.path), moved)]
    norms = (path for place in places.values() for path in place.norms(cuts))
    return replace(
        plan,
        tensors=plans_of_tensors(model, cuts.__getitem__, dtype_of),
        layers=[*layers, *(LayerPlan(path, NormOverRanks, ({},) * plan.world_size) for path in norms)],
        blocks=[new for block in plan.blocks for new in moved(block)],
        cuttable=frozenset(moved(name)[0] for name in plan.cuttable),
        settings={new: value for name, value in plan.settings.items() for new in moved(name)},
        quantized={moved(name)[0]: encoding for name, encoding in plan.quantized.items() if name not in added_to},
        misfits={moved(name)[0]: why for name, why in misfits.items()},
    )


@dataclass(frozen=True, eq=False)
class _Place:
    """A layer that has adapters, or trained copies (`modules_to_save`)."""

    path: str  # path of the layer in the model without adapters; with adapters, path of peft's outermost layer
    layers: tuple[str, ...]  # paths, in the model with adapters, of the layer itself and of its trained copies
    layer: Any  # the layer itself, which peft has wrapped
    # Path → peft's layer around the layer. If several parameters have adapters, peft's layers contain each other.
    adapters: dict[str, Any]

    def moved(self, name: str) -> list[str]:
        """Return the names, in the model with adapters, of a tensor: in the layer itself, then in each trained copy."""
        return [layer + name.removeprefix(self.path) for layer in self.layers]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters to which peft adds adapters directly, instead of adding to the layer's output."""
        names = (getattr(adapter, "parameter_name", None) for adapter in self.adapters.values())
        return [f"{self.path}.{name}" for name in names if name]

    def cuts(self, plan: ShardPlan, is_cut: bool) -> dict[str, Cut]:
        cuts_by_name: dict[str, Cut] = {}
        for path, adapter in self.adapters.items():
            weight = plan.tensors.get(f"{self.path}.{getattr(adapter, 'parameter_name', 'weight')}")
            counted = self._counted(weight, hasattr(adapter, "parameter_name")) if is_cut else ""
            for name, tensor in adapter.named_parameters(remove_duplicate=False):
                if (counts := _COUNTS.get(name.partition(".")[0])) is not None:
                    cuts_by_name[f"{path}.{name}"] = _cut(name, tensor, counts, weight, counted, plan.world_size)
        return cuts_by_name

    def norms(self, cuts: Mapping[str, Cut]) -> Iterator[str]:
        for path, adapter in self.adapters.items():
            for name in adapter.lora_magnitude_vector.keys() if hasattr(adapter, "lora_magnitude_vector") else ():
                if any(shard.dim is not None for shard in cuts[f"{path}.lora_A.{name}.weight"][0]):
                    yield f"{path}.lora_magnitude_vector.{name}"

    def _counted(self, weight: TensorPlan | None, stacked: bool) -> str:
        """Return whether the layer's weight is cut by "inputs" or "outputs"; "" if every rank holds the whole weight.

        `stacked` says that the weight may be 3-D, with one matrix for each expert.
        """
        if weight is not None and weight.is_replicated:
            return ""
        counts: tuple[str, ...] = ()
        if isinstance(self.layer, (Conv1D, nn.Embedding)):
            counts = ("inputs", "outputs")
        elif isinstance(self.layer, nn.Linear) or stacked:
            counts = ("outputs", "inputs")
            if weight is not None and len(weight.shape) == 3:
                counts = ("", *(reversed(counts) if getattr(self.layer, "is_transposed", False) else counts))
        dim = None if weight is None else weight.shards[0].dim
        if dim is None or dim >= len(counts):
            raise UnsupportedModelError(
                f"the adapter of {self.path}, a {type(self.layer).__name__}, cannot be cut; {_MERGE}"
            )
        return counts[dim]


def _cut(
    name: str, tensor: torch.Tensor, counts: tuple[str, ...], weight: TensorPlan | None, counted: str, ranks: int
) -> Cut:
    if weight is not None and name.endswith(".bias") and counted == "inputs":
        return (WHOLE, *[ZERO] * (ranks - 1)), weight.rule  # the sum over the ranks must have the bias only once
    dim = counts.index(counted) if counted and counted in counts else None
    if weight is None or dim is None or tensor.shape[dim] == 1:
        return (WHOLE,) * ranks, ""
    return tuple(replace(shard, dim=dim) for shard in weight.shards), weight.rule


def _moved_layer(layer: LayerPlan, place: _Place | None, moved: Any) -> list[LayerPlan]:
    if place is None or not place.adapters or layer.cls is StoredInParts:
        return [replace(layer, path=path) for path in moved(layer.path)]
    # peft's layer becomes the parallel layer, so that ranks exchange the sum of the layer's and the adapters' outputs.
    inner = place.layers[0].removeprefix(f"{place.path}.")
    attributes = tuple(own | {f"{inner}.{name}": value for name, value in own.items()} for own in layer.attributes)
    return [replace(layer, attributes=attributes)]


def _places(model: nn.Module) -> Iterator[_Place]:
    latest: _Place | None = None
    for path, module in model.named_modules():
        if "_active_adapter" not in vars(module) or (latest is not None and path in latest.adapters):
            continue
        if latest is not None and is_within(path, latest.path):
            raise UnsupportedModelError(f"{path} has an adapter inside {latest.path}, which also has one; {_MERGE}")
        latest = _place(path, module)
        yield latest


def _place(path: str, module: Any) -> _Place:
    if {"original_module", "modules_to_save"} <= module._modules.keys():
        copies = (f"{path}.modules_to_save.{name}" for name in module.modules_to_save._modules)
        return _Place(path, (f"{path}.original_module", *copies), module.original_module, {})
    adapters: dict[str, Any] = {}
    inner, layer = path, module
    while "_active_adapter" in vars(layer) and "base_layer" in layer._modules:
        if layer.merged_adapters:
            raise UnsupportedModelError(f"the adapter of {path} is merged; call unmerge_adapter() before parallelize")
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        variants = {type(variant).__name__ for variant in getattr(layer, "lora_variant", {}).values()}
        if {name.partition(".")[0] for name, _ in tensors} - {"base_layer", *_COUNTS} or variants - _VARIANTS:
            break
        adapters[inner], inner, layer = layer, f"{inner}.base_layer", layer.base_layer
    if "_active_adapter" in vars(layer):
        kinds = "".join(f" with {type(each).__name__}" for each in getattr(layer, "lora_variant", {}).values())
        name = f"{type(layer).__module__}.{type(layer).__qualname__}{kinds}"
        raise UnsupportedModelError(f"{path} is a {name}; only LoRA, DoRA and IA3 adapters can be cut; {_MERGE}")
    return _Place(path, (inner,), layer, adapters)
