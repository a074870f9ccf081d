"""Converts the layers of a model with quantized weights in memory to plain layers, and back after parallelization.

The model's state is read like a checkpoint of its quantization library, into a plain model with unread weights. Each
quantized layer gets the class and the parameters of its plain counterpart, and keeps its hooks. The caller's process
keeps the quantized parameters in memory until `deparallelize()` puts them back. Adapters keep wrapping the converted
layers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.checkpoint.formats.stored_tensors import StoredTensors
from parallelformers_ng.checkpoint.formats.unpacking import unpacked
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.loading import model_of
from parallelformers_ng.checkpoint.nodes import FetchedLeaf
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.sharding.adapters import with_layers, without_adapters
from parallelformers_ng.sharding.casting import holds_plain_weights
from parallelformers_ng.sharding.tensors import dotted

# Attributes of a quantized model; while they exist, transformers refuses to save or move the model.
_MARKS = ("hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit")


def plain_counterpart(model: PreTrainedModel, dtype: torch.dtype | None, dequantize: bool) -> PreTrainedModel | None:
    """Return an unquantized copy of a quantized model, whose weights are lazy tensors; None for other models."""
    bare: Any = without_adapters(model)
    described = {name: tensor for name, tensor in bare.named_parameters() if hasattr(tensor, "tensor_data_names")}
    if not described and (not getattr(model, "is_quantized", False) or holds_plain_weights(bare)):
        return None
    config = copy.deepcopy(model.config)
    quantization = vars(config).pop("quantization_config", None)
    quantization = quantization.to_dict() if hasattr(quantization, "to_dict") else quantization
    if described:
        quantization = {"quant_method": "torchao"}
    where, dtype = f"the {type(model).__name__} given", dtype or bare.dtype
    if quantization is None:
        raise UnsupportedModelError(
            f"{where} is quantized, and its configuration does not name the method; pass the path of its checkpoint, so"
            " that each rank reads its part"
        )
    state = {name: LazyTensor(_leaf(name, tensor)) for name, tensor in _parts(bare.state_dict())}
    header = {name: json.dumps(_description(tensor)) for name, tensor in described.items()}
    header["tensor_names"] = json.dumps(list(header))
    stored = StoredTensors(state, quantization, where, dtype, lambda: bare, header, dequantize)
    plain = model_of(type(model), config, where, unpacked(stored), dtype=dtype)
    if bare is model:
        return plain
    adapted: Any = with_layers(model, {path: layer for path, layer in plain.named_modules() if _unpacked(layer)})
    for name in _MARKS:
        vars(adapted).pop(name, None)
    vars(adapted.config).pop("quantization_config", None)
    return adapted


class ConvertedLayers:
    """Conversion of a model's quantized layers, in place, to the unquantized layers of `plain`; `restore` undoes it.

    Attributes:
        names: names of the parameters that the conversion added to the model.
    """

    def __init__(self, model: PreTrainedModel, plain: PreTrainedModel) -> None:
        self._model = model
        self._marks = {name: vars(model).pop(name) for name in _MARKS if name in vars(model)}
        self._quantization = vars(model.config).pop("quantization_config", None)
        self._layers: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []
        self.names: set[str] = set()
        for path, module in plain.named_modules():
            if _unpacked(module):
                self._enter(model.get_submodule(path), module)
                lazy_names = (name for name, tensor in module._parameters.items() if isinstance(tensor, LazyTensor))
                self.names |= {dotted(path, name) for name in lazy_names}

    def _enter(self, layer: nn.Module, plain: nn.Module) -> None:
        self._layers.append((layer, type(layer), dict(vars(layer))))
        kept = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}
        parts = {**vars(plain), **{name: vars(layer)[name] for name in kept}}
        vars(layer).clear()
        layer.__class__ = type(plain)
        vars(layer).update(parts)

    def restore(self) -> None:
        while self._layers:
            layer, cls, parts = self._layers.pop()
            vars(layer).clear()
            layer.__class__ = cls
            vars(layer).update(parts)
        vars(self._model).update(self._marks)
        if self._quantization is not None:
            self._model.config.quantization_config = self._quantization


def _unpacked(layer: nn.Module) -> bool:
    """Return whether a layer of the unquantized copy has a weight that is dequantized from a quantized tensor."""
    tensors = layer._parameters.values()
    return any(isinstance(each, LazyTensor) and not isinstance(each.node, FetchedLeaf) for each in tensors)


def _parts(state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors as a checkpoint would store them: a torchao tensor becomes several plain tensors."""
    for name, tensor in state.items():
        if hasattr(tensor, "tensor_data_names"):
            path, _, short = name.rpartition(".")
            yield from ((f"{path}._{short}_{part}", getattr(tensor, part)) for part in _names_of_parts(tensor))
        else:
            yield name, tensor


def _names_of_parts(tensor: Any) -> list[str]:
    names = (*tensor.tensor_data_names, *getattr(tensor, "optional_tensor_data_names", ()))
    return [name for name in names if getattr(tensor, name) is not None]


def _description(tensor: Any) -> dict[str, Any]:
    """Describe a torchao tensor in the format of the header of a torchao checkpoint."""
    data: dict[str, Any] = {"block_size": list(getattr(tensor, "block_size", ()))}
    if hasattr(tensor, "target_dtype"):
        data["target_dtype"] = str(tensor.target_dtype)
    return {"_type": type(tensor).__name__, "_data": data, "_tensor_data_names": _names_of_parts(tensor)}


def _leaf(name: str, tensor: torch.Tensor) -> FetchedLeaf:
    return FetchedLeaf(tuple(tensor.shape), tensor.dtype, lambda: tensor.detach().cpu(), name)
