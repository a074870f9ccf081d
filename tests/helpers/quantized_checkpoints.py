"""Makes tiny quantized checkpoints with the libraries of their formats, and their logits in one process.

`python -m tests.helpers.quantized_checkpoints FOLDER` writes them in a separate process, since transformers looks for
libraries when it is imported.

FOLDER/NAME is the checkpoint; FOLDER/NAME/expected.safetensors has the logits, the greedy tokens and the dequantized
weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from tests.helpers.apart import find_packages

    find_packages()

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.zoo.build import build
from tests.zoo.case import text_inputs

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "pad_token_id": 0,
}
GREEDY = {"max_new_tokens": 6, "do_sample": False}
EXPECTED = "expected.safetensors"


def llama() -> Any:
    return build(LlamaForCausalLM, LlamaConfig(**SIZES, intermediate_size=96))


def gpt2() -> Any:
    """Return a GPT-2, whose weights are transposed, one of them square."""
    return build(GPT2LMHeadModel, GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=131, pad_token_id=0))


def gpt_oss() -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 64}
    return build(GptOssForCausalLM, GptOssConfig(**SIZES, **experts), attention="eager")


def qwen3_moe() -> Any:
    """Return a mixture of experts; its checkpoints hold single experts, which transformers stacks."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "moe_intermediate_size": 32}
    return build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **experts, intermediate_size=96))


def loaded(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def rewritten(path: Path, model: Any, quantization: dict[str, Any], encode: Callable[[str, Any], dict | None]) -> None:
    """Save a model, and replace each weight by the result of `encode` unless the result is None."""
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    stored: dict[str, torch.Tensor] = {}
    for name, weight in load_file(path / "model.safetensors").items():
        replacement = encode(name, weight)
        stored |= {name: weight} if replacement is None else replacement
    save_file({name: part.contiguous() for name, part in stored.items()}, path / "model.safetensors", {"format": "pt"})


def fp8(path: Path, block: list[int] | None, make: Callable[[], Any] = llama, **options: Any) -> Any:
    """Save a model in 8-bit floats, quantized by transformers' own operation."""
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = FineGrainedFP8Config(weight_block_size=block, **options)
    operation = Fp8Quantize(SimpleNamespace(quantization_config=config))

    def encode(name: str, weight: Any) -> dict | None:
        return operation.convert({name: weight}) if name.endswith("_proj.weight") else None

    rewritten(path, make(), config.to_dict(), encode)
    return loaded(path, quantization_config=FineGrainedFP8Config(dequantize=True))


def mxfp4(path: Path) -> Any:
    """Save a model with random codes of mxfp4: the real encoder needs a GPU."""
    from transformers import Mxfp4Config

    generator = torch.Generator().manual_seed(0)

    def encode(name: str, weight: Any) -> dict | None:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return None
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 127, shape[:-1], dtype=torch.uint8, generator=generator)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    rewritten(path, gpt_oss(), {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, encode)
    return loaded(path, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager")


def compressed(path: Path, kind: str, **weights: Any) -> Any:
    """Save a model quantized by compressed-tensors, except for the choice of scales."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import CompressedTensorsConfig

    model, symmetric = llama(), weights.get("symmetric", True)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**{"symmetric": True, **weights}), format=kind
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], format=kind, quantization_status="frozen"
    )
    apply_quantization_config(model, config)
    for layer in model.modules():
        if getattr(layer, "quantization_scheme", None) is None:
            continue
        rows, columns = layer.weight_scale.shape if layer.weight_scale.ndim == 2 else (1, 1)
        blocks = layer.weight.detach().unflatten(1, (columns, -1)).unflatten(0, (rows, -1))
        args = layer.quantization_scheme.weights
        scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
        layer.weight_scale.data = scale.reshape(layer.weight_scale.shape)
        if not symmetric:
            layer.weight_zero_point.data = zero.reshape(layer.weight_scale.shape).to(torch.int8)
    compressor = ModelCompressor(quantization_config=config)
    if not symmetric:  # transformers reads no zero points, so the library decides their meaning
        state = {name: layer.state_dict() for name, layer in model.named_modules() if hasattr(layer, "weight_scale")}
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)
    if symmetric:
        return loaded(path, quantization_config=CompressedTensorsConfig(dequantize=True))
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    plain = llama()
    for name, parts in state.items():
        weight = fake_quantize(parts["weight"], parts["weight_scale"], parts["weight_zero_point"], scheme.weights)
        plain.get_submodule(name).weight.data = weight
    return plain


def experts_in_8_bits(path: Path) -> Any:
    """Save experts as compressed-tensors writes them: each expert's matrices have their own scales."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "format": "int-quantized"}
    said = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    plain = {}

    def encode(name: str, weight: Any) -> dict | None:
        if not name.endswith("_proj.weight"):
            return None
        scale = weight.abs().amax(1, keepdim=True) / 127
        numbers = (weight / scale).round().to(torch.int8)
        plain[name] = numbers * scale
        return {name: numbers, f"{name}_scale": scale}

    model = qwen3_moe()
    rewritten(path, model, said, encode)
    (path / "plain").mkdir()
    model.save_pretrained(path / "plain")
    state = load_file(path / "plain" / "model.safetensors") | plain
    save_file(state, path / "plain" / "model.safetensors", {"format": "pt"})
    return loaded(path / "plain")


def bitsandbytes(path: Path, make: Callable[[], PreTrainedModel] = llama, **options: Any) -> Any:
    from transformers import BitsAndBytesConfig

    make().save_pretrained(path / "plain")
    loaded(path / "plain", quantization_config=BitsAndBytesConfig(**options)).save_pretrained(path)
    plain = make()
    for name, layer in loaded(path).named_modules():
        if hasattr(layer, "source_cls"):
            weight = in_high_precision(layer)
            is_linear = layer.source_cls is nn.Linear
            plain.get_submodule(name).weight.data = weight if is_linear else weight.T.contiguous()
    return plain


def in_high_precision(layer: Any) -> torch.Tensor:
    """Return the dequantized weight of a layer of bitsandbytes.

    Its CPU kernel (0.50.2) misreads 4-bit blocks that end within a row. If all values are in one row, no block ends
    within a row.
    """
    import copy

    from bitsandbytes.functional import dequantize_4bit
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    weight = layer.weight
    if not hasattr(weight, "quant_state"):
        return dequantize_bnb_weight(weight, layer.state).detach()
    state = copy.copy(weight.quant_state)
    shape, state.shape = state.shape, torch.Size((state.shape.numel(),))
    return dequantize_4bit(weight.data, state).view(shape)


def torchao(path: Path, config: Callable[[Any], Any]) -> Any:
    from torchao import quantization
    from transformers import TorchAoConfig

    llama().save_pretrained(path / "plain")
    loaded(path / "plain", quantization_config=TorchAoConfig(config(quantization))).save_pretrained(path)
    model = loaded(path)
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and hasattr(layer.weight, "dequantize"):
            layer.weight = nn.Parameter(layer.weight.dequantize())
    return model


def packed(numbers: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack integers into 32-bit words along a dimension, lowest bits first; `order` permutes the integers of a word."""
    each = 32 // bits
    parts = numbers.long().unflatten(dim, (-1, each)).movedim(dim + 1, -1)[..., list(order or range(each))]
    words = (parts << torch.arange(each) * bits).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def in_groups(path: Path, model: Any, said: dict[str, Any], order: Callable[[int], torch.Tensor]) -> Any:
    """Save a model in the format of GPTQ or AWQ, packed as the format's documentation says. The formats' own writers
    need another torch, or a GPU."""
    bits, group, is_awq = said["bits"], said["group_size"], said["quant_method"] == "awq"
    plain, stored = model(), {}
    generator = torch.Generator().manual_seed(0)

    def encode(name: str, weight: torch.Tensor) -> dict | None:
        layer = name.removesuffix(".weight")
        if not layer.endswith(("_proj", "c_attn", "c_fc")) or not name.endswith(".weight"):
            return None
        transposed = type(plain.get_submodule(layer)) is not nn.Linear
        shape = tuple(weight.shape if transposed else weight.T.shape)
        groups = order(shape[0]) if group > 0 else torch.zeros(shape[0], dtype=torch.long)
        count = int(groups.max()) + 1
        numbers = torch.randint(0, 1 << bits, shape, generator=generator)
        zeros = torch.randint(1, 1 << bits, (count, shape[1]), generator=generator)
        if said.get("sym"):
            zeros.fill_(1 << bits - 1)
        scales = (torch.rand((count, shape[1]), generator=generator) + 0.5) / (1 << bits) / shape[0] ** 0.5
        scales = scales.half()
        dequantized = (numbers - zeros[groups]) * scales[groups].float()
        stored[name] = dequantized if transposed else dequantized.T.contiguous()
        if is_awq:
            turns = (0, 2, 4, 6, 1, 3, 5, 7)
            parts = {"qweight": packed(numbers, bits, 1, turns), "qzeros": packed(zeros, bits, 1, turns)}
        else:
            less = zeros if said.get("checkpoint_format") == "gptq_v2" else zeros - 1
            parts = {"qweight": packed(numbers, bits, 0), "qzeros": packed(less, bits, 1), "g_idx": groups.int()}
        return {f"{layer}.{part}": tensor for part, tensor in {**parts, "scales": scales}.items()}

    rewritten(path, plain, said, encode)
    plain.load_state_dict(stored, strict=False)
    return plain


def in_turn(group: int) -> Callable[[int], torch.Tensor]:
    return lambda inputs: torch.arange(inputs) // group


def shuffled(group: int) -> Callable[[int], torch.Tensor]:
    return lambda inputs: (torch.arange(inputs) // group)[torch.randperm(inputs, generator=torch.Generator())]


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
FORMATS: dict[str, Callable[[Path], Any]] = {
    "fp8-blocks": lambda path: fp8(path, [16, 32]),
    "fp8-powers": lambda path: fp8(path, [16, 16], scale_fmt="ue8m0"),
    "fp8-tensors": lambda path: fp8(path, None),
    "mxfp4": mxfp4,
    "compressed-int8": lambda path: compressed(path, "int-quantized", num_bits=8, type="int", strategy="channel"),
    "compressed-int8-packed": lambda path: compressed(path, "pack-quantized", **{**INT4, "num_bits": 8}),
    "compressed-int4": lambda path: compressed(path, "pack-quantized", **INT4),
    "compressed-int4-zeros": lambda path: compressed(path, "pack-quantized", **INT4, symmetric=False),
    "compressed-fp8": lambda path: compressed(path, "float-quantized", num_bits=8, type="float", strategy="channel"),
    "compressed-fp8-blocks": lambda path: compressed(
        path, "naive-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]
    ),
    "bitsandbytes-int8": lambda path: bitsandbytes(path, load_in_8bit=True),
    "bitsandbytes-int8-gpt2": lambda path: bitsandbytes(path, gpt2, load_in_8bit=True),
    "bitsandbytes-nf4": lambda path: bitsandbytes(
        path, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage="bfloat16"
    ),
    "bitsandbytes-nf4-gpt2": lambda path: bitsandbytes(path, gpt2, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes-fp4-double": lambda path: bitsandbytes(
        path, load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True
    ),
    "torchao-int8": lambda path: torchao(path, lambda ao: ao.Int8WeightOnlyConfig()),
    "torchao-int4": lambda path: torchao(
        path, lambda ao: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.granularity.PerGroup(32))
    ),
    "torchao-fp8": lambda path: torchao(path, lambda ao: ao.Float8WeightOnlyConfig()),
    "gptq": lambda path: in_groups(path, llama, {"quant_method": "gptq", "bits": 4, "group_size": 16}, in_turn(16)),
    "gptq-symmetric": lambda path: in_groups(
        path, llama, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, in_turn(32)
    ),
    "gptq-shuffled": lambda path: in_groups(
        path,
        llama,
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"},
        shuffled(32),
    ),
    "gptq-gpt2": lambda path: in_groups(path, gpt2, {"quant_method": "gptq", "bits": 2, "group_size": -1}, in_turn(64)),
    "awq": lambda path: in_groups(
        path, llama, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, in_turn(32)
    ),
    "experts-int8": experts_in_8_bits,
    "experts-fp8-blocks": lambda path: fp8(path, [16, 32], qwen3_moe),
}
KIND_ON_RANKS = {
    "compressed-int8": "int8",
    "compressed-int8-packed": "int8",
    "bitsandbytes-int8": "int8",
    "bitsandbytes-int8-gpt2": "int8",
    "torchao-int8": "int8",
    "experts-int8": "int8",
    "compressed-int4": "int4",
    "torchao-int4": "int4",
    "gptq-symmetric": "int4",
    "fp8-blocks": "fp8",
    "fp8-powers": "fp8",
    "fp8-tensors": "fp8",
    "compressed-fp8": "fp8",
    "compressed-fp8-blocks": "fp8",
    "torchao-fp8": "fp8",
    "experts-fp8-blocks": "fp8",
}
"""Kind of encoding on the ranks, for formats that may stay quantized without `dequantize`."""
READ_BY_KERNELS = (
    "compressed-int8", "bitsandbytes-int8", "bitsandbytes-int8-gpt2", "torchao-int8", "experts-int8", "torchao-int4",
    "gptq-symmetric",
)  # fmt: skip
"""Formats that stay quantized with `dequantize`, too."""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for name, make in FORMATS.items():
        path = folder / name
        path.mkdir()
        model = make(path).eval()
        with torch.no_grad():
            logits, tokens = model(**text_inputs()).logits, model.generate(**text_inputs(), **GREEDY)
        state = {f"state.{key}": tensor.contiguous().clone() for key, tensor in model.state_dict().items()}
        save_file({"logits": logits, "tokens": tokens, **state}, path / EXPECTED)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
