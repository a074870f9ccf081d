"""Tests that models quantized in memory compute and are saved correctly, and are restored by `deparallelize`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, FineGrainedFP8Config, LlamaForCausalLM

from parallelformers_ng import CheckpointError, ParallelError, UnsupportedModelError, parallelize, plan, save_sharded
from tests.helpers.apart import find_packages
from tests.helpers.quantized_checkpoints import GREEDY, in_high_precision, llama
from tests.zoo.build import largest_difference
from tests.zoo.case import text_inputs

find_packages()
DEQUANTIZE = {"dequantize": True}


def by_torchao(scheme: str) -> tuple[Any, Any]:
    """Return a model quantized by torchao, and a plain one with the same weights."""
    from torchao import quantization as ao

    configs = {
        "int8": ao.Int8WeightOnlyConfig,
        "int4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.granularity.PerGroup(32)),
        "fp8": ao.Float8WeightOnlyConfig,
    }
    model, plain = llama().requires_grad_(False), llama()
    ao.quantize_(model, configs[scheme](), lambda layer, path: type(layer) is nn.Linear and path != "lm_head")
    for path, layer in model.named_modules():
        if hasattr(layer, "weight") and hasattr(layer.weight, "dequantize"):
            plain.get_submodule(path).weight.data = layer.weight.dequantize().detach()
    return model, plain


def by_bitsandbytes(scheme: str) -> tuple[Any, Any]:
    """Return a model with layers of bitsandbytes as transformers makes it, and a plain one with the same weights."""
    bnb = pytest.importorskip("bitsandbytes").nn
    model, plain = llama(), llama()
    for path, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or path == "lm_head":
            continue
        size = layer.in_features, layer.out_features
        if scheme == "int8":
            quantized = bnb.Linear8bitLt(*size, bias=False, has_fp16_weights=False)
            quantized.weight = bnb.Int8Params(layer.weight.detach(), requires_grad=False, has_fp16_weights=False).to(
                "cpu"
            )
        else:
            quantized = bnb.Linear4bit(*size, bias=False, quant_type=scheme)
            quantized.weight = bnb.Params4bit(layer.weight.detach(), requires_grad=False, quant_type=scheme).to("cpu")
        quantized.source_cls = nn.Linear
        model.set_submodule(path, quantized)
        plain.get_submodule(path).weight.data = in_high_precision(quantized)
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=scheme == "int8", load_in_4bit=scheme != "int8")
    model.is_quantized = True
    setattr(model, "is_loaded_in_8bit" if scheme == "int8" else "is_loaded_in_4bit", True)  # peft reads this flag
    return model.eval(), plain


def by_blocks(scheme: str) -> tuple[Any, Any]:
    """Return a model with transformers' layers of 8-bit floats scaled by blocks, and a plain one with the same
    weights."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    assert scheme == "fp8"
    model, plain = llama().requires_grad_(False), llama()
    for path, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear or path == "lm_head":
            continue
        quantized = FP8Linear(layer.in_features, layer.out_features, block_size=(16, 32)).requires_grad_(False)
        blocks = layer.weight.unflatten(1, (-1, 32)).unflatten(0, (-1, 16))
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        quantized.weight.data = (blocks / scales[:, None, :, None]).reshape(layer.weight.shape).to(torch.float8_e4m3fn)
        quantized.weight_scale_inv.data = scales
        model.set_submodule(path, quantized)
        read = quantized.weight.float().unflatten(1, (-1, 32)).unflatten(0, (-1, 16)) * scales[:, None, :, None]
        plain.get_submodule(path).weight.data = read.reshape(layer.weight.shape)
    model.config.quantization_config = FineGrainedFP8Config(weight_block_size=[16, 32])
    model.is_quantized = True
    return model.eval(), plain


def state_of(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    return {name: copy.deepcopy(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("make", "scheme"),
    [
        (by_torchao, "int8"), (by_torchao, "int4"), (by_torchao, "fp8"),
        (by_bitsandbytes, "int8"), (by_bitsandbytes, "nf4"), (by_bitsandbytes, "fp4"), (by_blocks, "fp8"),
    ],
)  # fmt: skip
def test_quantized_model_computes_is_saved_and_restored(make: Any, scheme: str, tmp_path: Path, groups) -> None:
    model, plain = make(scheme)
    want, tokens = plain(**text_inputs()).logits, plain.generate(**text_inputs(), **GREEDY)
    before, layer, kind = (
        state_of(model),
        model.model.layers[1].mlp.down_proj,
        type(model.model.layers[1].mlp.down_proj),
    )
    config = getattr(model.config, "quantization_config", None)
    stays = scheme in ("int8", "int4") or make is by_torchao
    assert bool(plan(model, 2, quantize=DEQUANTIZE).quantized) == (scheme in ("int8", "int4"))  # kernels read these
    parallelize(model, workers=groups(2), quantize=None if stays else DEQUANTIZE)
    assert bool(model.shard_plan.quantized) == stays
    assert model.model.layers[1].mlp.down_proj is layer
    assert largest_difference(model(**text_inputs()).logits, want) <= 1e-4
    assert torch.equal(model.generate(**text_inputs(), **GREEDY), tokens)
    model.save_pretrained(tmp_path / "whole")
    save_sharded(model, tmp_path / "cut")
    model.deparallelize()

    assert type(model.model.layers[1].mlp.down_proj) is kind
    assert getattr(model.config, "quantization_config", None) is config
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        value = after[name]
        if hasattr(tensor, "dequantize") and hasattr(tensor, "tensor_data_names"):
            assert type(value) is type(tensor)
            tensor, value = tensor.dequantize(), value.dequantize()
        assert torch.equal(value, tensor) if isinstance(tensor, torch.Tensor) else value == tensor
    whole = LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    assert largest_difference(whole(**text_inputs()).logits, want) <= 1e-4
    # three ranks have no whole groups of 32 inputs in heads of 16
    with parallelize(tmp_path / "cut", workers=groups(3), quantize=DEQUANTIZE if scheme == "int4" else None) as again:
        assert largest_difference(again(**text_inputs()).logits, want) <= 1e-4


def test_tensor_subclasses_in_a_pickle_are_refused(tmp_path: Path) -> None:
    model, plain = by_torchao("int8")
    plain.config.quantization_config = {"quant_method": "torchao"}
    plain.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has .*_proj.weight as a Int8Tensor.*save the model as safetensors"):
        parallelize(tmp_path, 2)


def test_refusal_leaves_the_model_unchanged(groups) -> None:
    model, _ = by_bitsandbytes("nf4")
    kinds = {path: type(module) for path, module in model.named_modules()}
    with pytest.raises(
        UnsupportedModelError, match=r"the LlamaForCausalLM given is quantized by bitsandbytes.*'dequantize'"
    ):
        parallelize(model, workers=groups(2))
    with pytest.raises(ParallelError, match="skip names 'nothing'"):
        parallelize(model, workers=groups(2), quantize={"scheme": "int8", "dequantize": True, "skip": ["nothing"]})
    assert {path: type(module) for path, module in model.named_modules()} == kinds
    assert hasattr(model.model.layers[0].mlp.up_proj.weight, "quant_state")
    assert model(**text_inputs()).logits.isfinite().all()
