"""Checks that a model is of a kind that `parallelize` supports."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.errors import AlreadyParallelizedError, UnsupportedModelError
from parallelformers_ng.live_code.stock import tensor_of_own_class
from parallelformers_ng.model.parallelized import is_parallelized


def check_model(model: nn.Module) -> None:
    """Raise an error if `parallelize` cannot support this kind of model under any policy."""
    if is_parallelized(model):
        raise AlreadyParallelizedError(f"{type(model).__name__} is parallelized already; call deparallelize() first")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{path or type(model).__name__} is a TorchScript module, which cannot be sent to the workers. Pass the"
                " model with the module that was scripted or traced"
            )
        compiled = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        if compiled or "_orig_mod" in module._modules:
            raise UnsupportedModelError(
                f"{path or type(model).__name__} is compiled by torch.compile, but the workers cannot run code compiled"
                " for the whole model. Pass the model without torch.compile; decode='compile' compiles the decode steps"
            )
    if not isinstance(model, PreTrainedModel):
        cls = type(model)
        hint = "; pass the result of model.merge_and_unload()" if hasattr(model, "merge_and_unload") else ""
        raise UnsupportedModelError(
            f"parallelize takes a transformers PreTrainedModel, not {cls.__module__}.{cls.__name__}{hint}"
        )
    name, kind = tensor_of_own_class(model)
    if name:
        raise UnsupportedModelError(
            f"{name} is a {kind}, a tensor class with its own torch functions, but the ranks hold plain tensors; pass"
            " the model with plain parameters"
        )
    if getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread by device_map={model.hf_device_map}; load it without device_map"
        )
