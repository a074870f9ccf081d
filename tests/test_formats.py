"""Checkpoints that are quantized already: read by slices, equal to what their own library makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from parallelformers_ng import CheckpointError, ParallelError, UnsupportedModelError, parallelize
from parallelformers_ng.checkpoint.loading import load_skeleton
from tests.apart import find_packages
from tests.zoo.build import build, largest_difference
from tests.zoo.case import text_inputs

find_packages()
DEQUANTIZE = {"dequantize": True}
State = dict[str, Tensor]


def saved(
    path: Path, model: Any, quantization: dict[str, Any], encode: Callable[[str, Tensor], tuple[State, Tensor] | None]
) -> Any:
    """A quantized checkpoint of a model, and the model with the weights that the checkpoint stands for.

    Args:
        encode: gives what is stored of a weight, and the weight that it stands for; None for one that is plain.
    """
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    stored, state = load_file(path / "model.safetensors"), model.state_dict()
    for name, weight in list(stored.items()):
        if (made := encode(name, weight)) is not None:
            del stored[name]
            stored |= made[0]
            if name in state:
                state[name].copy_(made[1])
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors", {"format": "pt"}
    )
    return model


SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
}


def llama() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**SIZES, intermediate_size=96, pad_token_id=0))


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def fp8(block: int, path: Path) -> Any:
    """DeepSeek's blocks."""

    def encode(name: str, weight: Tensor) -> tuple[State, Tensor] | None:
        if not is_matrix(name):
            return None
        rows, columns = (-(-size // block) for size in weight.shape)
        scales = torch.rand(rows, columns) + 0.5
        spread = scales.repeat_interleave(block, 0)[: len(weight)].repeat_interleave(block, 1)[:, : weight.shape[1]]
        numbers = (weight / spread).to(torch.float8_e4m3fn)
        return {name: numbers, f"{name}_scale_inv": scales}, numbers.float() * spread

    return saved(
        path,
        llama(),
        {"quant_method": "fp8", "weight_block_size": [block, block]},
        encode,
    )


def compressed(kind: str, group: int | None, path: Path) -> Any:
    """As compressed-tensors stores them: int8 or float8 for each output, packed int4 for groups of inputs."""
    bits = {"int-quantized": 8, "float-quantized": 8, "pack-quantized": 4}[kind]
    most = 448.0 if kind == "float-quantized" else 2.0 ** (bits - 1) - 1

    def encode(name: str, weight: Tensor) -> tuple[State, Tensor] | None:
        if not is_matrix(name):
            return None
        blocks = weight.unflatten(1, (-1, group or weight.shape[1]))
        scales = blocks.abs().amax(-1, keepdim=True) / most
        path = name.removesuffix(".weight")
        if kind == "float-quantized":
            numbers = (blocks / scales).to(torch.float8_e4m3fn)
        else:
            numbers = (blocks / scales).round().clamp(-most - 1, most).to(torch.int8)
        stored, flat = {f"{name}_scale": scales[..., 0]}, numbers.flatten(1)
        if kind == "pack-quantized":
            from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

            stored |= {f"{name}_packed": pack_to_int32(flat, 4), f"{path}.weight_shape": torch.tensor(weight.shape)}
        else:
            stored[name] = flat
        return stored, (numbers.float() * scales).flatten(1)

    weights = {
        "num_bits": bits,
        "type": "float" if kind == "float-quantized" else "int",
        "strategy": "group" if group else "channel",
        "group_size": group,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": {**weights, "symmetric": True}}}
    said = {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}
    return saved(path, llama(), said, encode)


def mxfp4(path: Path) -> Any:
    """gpt-oss's experts, put in high precision by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 64}
    model = build(GptOssForCausalLM, GptOssConfig(**SIZES, **experts, pad_token_id=0), attention="eager")

    def encode(name: str, weight: Tensor) -> tuple[State, Tensor] | None:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return None
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 127, blocks.shape[:-1], dtype=torch.uint8)
        plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, plain

    return saved(path, model, {"quant_method": "mxfp4"}, encode)


FORMATS: dict[str, Callable[[Path], Any]] = {
    "fp8 in blocks of 16": lambda path: fp8(16, path),
    "fp8 in blocks that end beyond the weight": lambda path: fp8(20, path),
    "compressed int8": lambda path: compressed("int-quantized", None, path),
    "compressed float8": lambda path: compressed("float-quantized", None, path),
    "compressed int4 in groups": lambda path: compressed("pack-quantized", 16, path),
    "mxfp4": mxfp4,
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_each_rank_reads_its_slices(name: str, world_size: int, tmp_path: Path, groups) -> None:
    if "int4" in name:
        pytest.importorskip("compressed_tensors")
    whole = FORMATS[name](tmp_path)
    with torch.no_grad():
        want = whole(**text_inputs()).logits
    stays = name == "compressed int8"
    model = parallelize(tmp_path, workers=groups(world_size), dtype="float32", quantize=None if stays else DEQUANTIZE)
    assert bool(model.shard_plan.quantized) == stays
    assert largest_difference(model(**text_inputs()).logits, want) <= 1e-4
    model.deparallelize()
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, whole.state_dict()[key])


def test_what_nothing_computes_with_is_refused_unless_it_may_be_put_in_high_precision(tmp_path: Path) -> None:
    fp8(16, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"quantized by fp8.*'dequantize': True"):
        load_skeleton(str(tmp_path))
    with pytest.raises(ParallelError, match="no scheme is given"):
        parallelize(tmp_path, 2, quantize={})


def test_a_model_on_meta_takes_no_number_without_its_scale(tmp_path: Path, groups) -> None:
    whole = fp8(16, tmp_path)
    with torch.device("meta"):
        bare = type(whole)(whole.config)
    with pytest.raises(UnsupportedModelError, match=r"quantized by fp8.*'dequantize': True"):
        parallelize(bare, workers=groups(2), weights=tmp_path)
    model = parallelize(bare, workers=groups(2), weights=tmp_path, quantize=DEQUANTIZE)
    assert largest_difference(model(**text_inputs()).logits, whole(**text_inputs()).logits) <= 1e-4
    model.deparallelize()


def test_another_format_is_refused_by_its_name(tmp_path: Path) -> None:
    saved(tmp_path, llama(), {"quant_method": "awq", "bits": 4}, lambda name, weight: None)
    with pytest.raises(UnsupportedModelError, match="quantized by awq, which cannot be cut yet; those of fp8"):
        load_skeleton(str(tmp_path), dequantize=True)


def test_eight_bits_of_what_was_in_other_ones(tmp_path: Path, groups) -> None:
    whole = fp8(16, tmp_path)
    both = {"scheme": "int8", "dequantize": True}
    model = parallelize(tmp_path, workers=groups(2), dtype="float32", quantize=both)
    assert {encoding.kind for encoding in model.shard_plan.quantized.values()} == {"int8"}
    assert largest_difference(model(**text_inputs()).logits, whole(**text_inputs()).logits) <= 0.1
    model.deparallelize()


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("fp8 in blocks of 16", lambda state: state.pop(f"{LAYER}.weight_scale_inv")),
        ("fp8 in blocks of 16", lambda state: state.pop(f"{LAYER}.weight")),
        ("fp8 in blocks of 16", lambda state: state.update({f"{LAYER}.weight_scale_inv": torch.ones(2, 2)})),
        ("compressed int8", lambda state: state.pop(f"{LAYER}.weight_scale")),
        ("compressed int8", lambda state: state.update({f"{LAYER}.weight_scale": torch.ones(7, 1)})),
        ("compressed int4 in groups", lambda state: state.update({f"{LAYER}.weight_scale": torch.ones(48, 3)})),
        ("compressed int4 in groups", lambda state: state.pop(f"{LAYER}.weight_packed")),
        ("compressed int4 in groups", lambda state: state.update({f"{LAYER}.weight_shape": torch.tensor([48, 7])})),
        ("mxfp4", lambda state: state.pop("model.layers.1.mlp.experts.down_proj_scales")),
        ("mxfp4", lambda state: state.update({"model.layers.1.mlp.experts.down_proj_scales": torch.ones(1)})),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_tensor(
    name: str, damage: Callable[[State], Any], tmp_path: Path
) -> None:
    if "int4" in name:
        pytest.importorskip("compressed_tensors")
    FORMATS[name](tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    damage(state)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=LAYER if name != "mxfp4" else "model.layers.1.mlp.experts.down_proj"):
        load_skeleton(str(tmp_path), dequantize=True)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("compressed")])
def test_weights_are_those_that_compressed_tensors_unpacks(name: str, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    whole = FORMATS[name](tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    library = compressors.BaseCompressor.get_value_from_registry(said["format"])
    parts = {key.removeprefix(f"{LAYER}."): tensor for key, tensor in stored.items() if key.startswith(LAYER)}
    unpacked = library.decompress(parts, QuantizationScheme(**said["config_groups"]["group_0"]))["weight"]
    assert torch.equal(unpacked, whole.state_dict()[f"{LAYER}.weight"])
