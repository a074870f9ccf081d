"""Compares models with adapters over quantized layers with peft in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from parallelformers_ng import UnsupportedModelError, parallelize, plan
from parallelformers_ng.model.parallelized import deployment_of
from tests.checkpoint.test_quantized_models import DEQUANTIZE, by_bitsandbytes, by_blocks, by_torchao, state_of
from tests.helpers.adapters import adapters_of_transformers, draw
from tests.helpers.apart import find_packages
from tests.helpers.patience import await_incarnation, kill
from tests.helpers.quantized_checkpoints import GREEDY, fp8
from tests.zoo.build import largest_difference
from tests.zoo.case import text_inputs

find_packages()
import peft  # noqa: E402

NAMES = ("default", "second", "third")
Answers = dict[str, tuple[torch.Tensor, torch.Tensor]]


def configs() -> list[peft.LoraConfig]:
    """Return configurations of adapters for all layers, for some layers, and for one layer together with a head."""
    targets = ("all-linear", ["q_proj", "o_proj", "up_proj"], ["down_proj"])
    heads = (None, None, ["lm_head"])
    return [
        peft.LoraConfig(r=rank, target_modules=each, modules_to_save=head, task_type="CAUSAL_LM")
        for rank, each, head in zip((4, 3, 2), targets, heads, strict=True)
    ]


def adapted(model: Any) -> Any:
    first, *others = configs()
    wrapped = peft.get_peft_model(model, first)
    for name, config in zip(NAMES[1:], others, strict=True):
        wrapped.add_adapter(name, config)
    return draw(wrapped)


def answers(model: Any) -> Answers:
    """Return logits and greedy tokens for each adapter, and without an adapter."""

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return model(**text_inputs()).logits, model.generate(**text_inputs(), **GREEDY)

    outputs = {}
    with torch.no_grad():
        for name in NAMES:
            model.set_adapter(name)
            outputs[name] = both()
        with model.disable_adapter():
            outputs["none"] = both()
    logits = [each for each, _ in outputs.values()]
    assert all(largest_difference(one, other) > 0.1 for one in logits for other in logits if one is not other)
    return outputs


def agree(got: Answers, want: Answers) -> None:
    for name, (logits, tokens) in want.items():
        assert largest_difference(got[name][0], logits) <= 1e-4
        assert torch.equal(got[name][1], tokens)


MADE: dict[str, tuple[Callable[[str], tuple[Any, Any]], str, str]] = {
    "torchao-int8": (by_torchao, "int8", "TorchaoLoraLinear"),
    "torchao-int4": (by_torchao, "int4", "TorchaoLoraLinear"),
    "bitsandbytes-int8": (by_bitsandbytes, "int8", "Linear8bitLt"),
    "bitsandbytes-nf4": (by_bitsandbytes, "nf4", "Linear4bit"),
    "fp8-blocks": (by_blocks, "fp8", "Linear"),
}


RANKS = [*((name, 2) for name in MADE), ("bitsandbytes-int8", 3), ("fp8-blocks", 3)]


@pytest.mark.parametrize(("name", "ranks"), RANKS)
def test_adapted_model_computes_and_is_restored(name: str, ranks: int, groups, tmp_path: Path) -> None:
    make, scheme, kind = MADE[name]
    base, plain = make(scheme)
    model, alone = adapted(base), adapted(plain)
    want, own = answers(alone), answers(model) if name == "torchao-int8" else None
    model.set_adapter("second")
    layers = {path: type(layer) for path, layer in model.named_modules()}
    assert layers["base_model.model.model.layers.1.mlp.down_proj"].__name__ == kind
    config, before = getattr(base.config, "quantization_config", None), state_of(model)
    # Weights stay quantized if the parts' widths are multiples of the scales' groups.
    stays = scheme != "nf4" and (scheme == "int8" or ranks == 2)
    parallelize(model, workers=groups(ranks), quantize=None if stays else DEQUANTIZE)
    assert bool(base.shard_plan.quantized) == stays
    assert all(".base_layer." in each for each in base.shard_plan.quantized)
    assert not base.shard_plan.tensors["model.layers.0.mlp.up_proj.lora_B.default.weight"].is_replicated
    assert torch.equal(model.generate(**text_inputs(), **GREEDY), want["second"][1])
    got = answers(model)
    agree(got, want)
    if own is not None:  # peft's results with the integers agree too
        agree(got, own)
    for each, folder in ((model, "cut"), (alone, "alone")):
        each.save_pretrained(tmp_path / folder)
    files = {path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*.safetensors")}
    assert len(files) == len(NAMES)
    assert files == {path.relative_to(tmp_path / "cut") for path in (tmp_path / "cut").rglob("*.safetensors")}
    for file in files:
        one, other = load_file(tmp_path / "alone" / file), load_file(tmp_path / "cut" / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(other[key], tensor) for key, tensor in one.items())
    model.set_adapter("third")
    model.deparallelize()

    assert {path: type(layer) for path, layer in model.named_modules()} == layers
    assert getattr(base.config, "quantization_config", None) is config
    after = model.state_dict()
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        value = after[key]
        if hasattr(tensor, "tensor_data_names"):
            assert type(value) is type(tensor)
            tensor, value = tensor.dequantize(), value.dequantize()
        assert torch.equal(value, tensor) if isinstance(tensor, torch.Tensor) else value == tensor
    assert model.active_adapter == "third"
    if own is not None:
        assert all(torch.equal(logits, own[each][0]) for each, (logits, _) in answers(model).items())


@adapters_of_transformers
def test_adapters_of_transformers_and_replicas() -> None:
    models = []
    for each in by_bitsandbytes("int8"):
        for name, config in zip(NAMES[:2], configs(), strict=False):
            each.add_adapter(config, adapter_name=name)
        models.append(draw(each))
    model, alone = models
    with parallelize(model, 1, workers={"device": "cpu", "replicas": 2}):
        for name in NAMES[:2]:
            for each in models:
                each.set_adapter(name)
            assert largest_difference(model(**text_inputs()).logits, alone(**text_inputs()).logits) <= 1e-4
            assert torch.equal(model.generate(**text_inputs(), **GREEDY), alone.generate(**text_inputs(), **GREEDY))
    assert type(model.model.layers[0].mlp.up_proj.base_layer).__name__ == "Linear8bitLt"


def test_dora_norms_are_those_of_dequantized_weights(groups) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
    model, alone = (draw(peft.get_peft_model(each, config)) for each in by_torchao("int8"))
    want = alone(**text_inputs()).logits
    with parallelize(model, workers=groups(2)):
        assert largest_difference(model(**text_inputs()).logits, want) <= 1e-4


@pytest.mark.slow  # more processes that import peft and its optional packages
def test_adapters_survive_a_worker_death() -> None:
    base, plain = by_bitsandbytes("int8")
    model, want = adapted(base), answers(adapted(plain))
    with parallelize(model, 2, workers={"device": "cpu"}):
        model.set_adapter("second")
        kill(deployment_of(base).pids[1])
        await_incarnation(base, 1)
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), want["second"][1])
        agree(answers(model), want)


def test_adapter_directory_over_quantized_checkpoint_is_loaded(groups, tmp_path: Path) -> None:
    base = fp8(tmp_path / "base", [16, 32])
    base.name_or_path = str(tmp_path / "base")
    alone = draw(peft.get_peft_model(base, configs()[0]))
    alone.save_pretrained(tmp_path / "adapter")
    with parallelize(tmp_path / "adapter", workers=groups(2), dtype="float32") as model:
        assert model.get_base_model().shard_plan.quantized
        assert largest_difference(model(**text_inputs()).logits, alone(**text_inputs()).logits) <= 1e-4
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), alone.generate(**text_inputs(), **GREEDY))


def kinds(model: nn.Module) -> dict[str, tuple[type, list[str]]]:
    return {path: (type(module), [*module._parameters]) for path, module in model.named_modules()}


def test_plan_and_refusal_leave_the_model_unchanged(groups) -> None:
    model = adapted(by_bitsandbytes("nf4")[0])
    before = kinds(model)
    models = plan(model, 2, quantize=DEQUANTIZE)
    assert models.tensors["model.layers.0.mlp.down_proj.base_layer.weight"].shape == (64, 96)
    with pytest.raises(UnsupportedModelError, match="the LlamaForCausalLM given is quantized by bitsandbytes"):
        parallelize(model, workers=groups(2))
    assert kinds(model) == before
    assert hasattr(model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight, "quant_state")
    assert model.get_base_model().is_quantized


def test_trained_copy_of_quantized_layer_is_refused(groups) -> None:
    model, _ = by_torchao("int8")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["up_proj"])
    with pytest.raises(
        UnsupportedModelError, match=r"up_proj.* and its trained copy .*modules_to_save\.default are quantized"
    ):
        parallelize(peft.get_peft_model(model, config), workers=groups(2))
