"""Models with adapters that are given with the layers beneath quantized in memory, against peft in one process."""

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
from tests.checkpoint.test_given import DEQUANTIZE, by_bitsandbytes, by_blocks, by_torchao, state_of
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
    """Adapters of all layers, of some, and of one with a head of its own."""
    targets = ("all-linear", ["q_proj", "o_proj", "up_proj"], ["down_proj"])
    heads = (None, None, ["lm_head"])
    return [
        peft.LoraConfig(r=rank, target_modules=each, modules_to_save=head, task_type="CAUSAL_LM")
        for rank, each, head in zip((4, 3, 2), targets, heads, strict=True)
    ]


def adapted(model: Any) -> Any:
    first, *others = configs()
    found = peft.get_peft_model(model, first)
    for name, config in zip(NAMES[1:], others, strict=True):
        found.add_adapter(name, config)
    return draw(found)


def answers(model: Any) -> Answers:
    """Logits and greedy tokens with each adapter, and with none."""

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return model(**text_inputs()).logits, model.generate(**text_inputs(), **GREEDY)

    found = {}
    with torch.no_grad():
        for name in NAMES:
            model.set_adapter(name)
            found[name] = both()
        with model.disable_adapter():
            found["none"] = both()
    logits = [each for each, _ in found.values()]
    assert all(largest_difference(one, other) > 0.1 for one in logits for other in logits if one is not other)
    return found


def agree(found: Answers, want: Answers) -> None:
    for name, (logits, tokens) in want.items():
        assert largest_difference(found[name][0], logits) <= 1e-4
        assert torch.equal(found[name][1], tokens)


MADE: dict[str, tuple[Callable[[str], tuple[Any, Any]], str, str]] = {
    "torchao-int8": (by_torchao, "int8", "TorchaoLoraLinear"),
    "torchao-int4": (by_torchao, "int4", "TorchaoLoraLinear"),
    "bitsandbytes-int8": (by_bitsandbytes, "int8", "Linear8bitLt"),
    "bitsandbytes-nf4": (by_bitsandbytes, "nf4", "Linear4bit"),
    "fp8-blocks": (by_blocks, "fp8", "Linear"),
}


RANKS = [*((name, 2) for name in MADE), ("bitsandbytes-int8", 3), ("fp8-blocks", 3)]


@pytest.mark.parametrize(("name", "ranks"), RANKS)
def test_it_computes_and_comes_back(name: str, ranks: int, groups, tmp_path: Path) -> None:
    make, scheme, kind = MADE[name]
    given, plain = make(scheme)
    model, alone = adapted(given), adapted(plain)
    want, own = answers(alone), answers(model) if name == "torchao-int8" else None
    model.set_adapter("second")
    layers = {path: type(layer) for path, layer in model.named_modules()}
    assert layers["base_model.model.model.layers.1.mlp.down_proj"].__name__ == kind
    config, before = getattr(given.config, "quantization_config", None), state_of(model)
    stays = scheme != "nf4" and (scheme == "int8" or ranks == 2)  # in parts that scales go with
    parallelize(model, workers=groups(ranks), quantize=None if stays else DEQUANTIZE)
    assert bool(given.shard_plan.quantized) == stays
    assert all(".base_layer." in each for each in given.shard_plan.quantized)
    assert not given.shard_plan.tensors["model.layers.0.mlp.up_proj.lora_B.default.weight"].is_replicated
    assert torch.equal(model.generate(**text_inputs(), **GREEDY), want["second"][1])
    found = answers(model)
    agree(found, want)
    if own is not None:  # also what peft computes with the integers
        agree(found, own)
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
    assert getattr(given.config, "quantization_config", None) is config
    after = model.state_dict()
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        held = after[key]
        if hasattr(tensor, "tensor_data_names"):
            assert type(held) is type(tensor)
            tensor, held = tensor.dequantize(), held.dequantize()
        assert torch.equal(held, tensor) if isinstance(tensor, torch.Tensor) else held == tensor
    assert model.active_adapter == "third"
    if own is not None:
        assert all(torch.equal(logits, own[each][0]) for each, (logits, _) in answers(model).items())


@adapters_of_transformers
def test_adapters_of_transformers_and_replicas() -> None:
    made = []
    for each in by_bitsandbytes("int8"):
        for name, config in zip(NAMES[:2], configs(), strict=False):
            each.add_adapter(config, adapter_name=name)
        made.append(draw(each))
    model, alone = made
    with parallelize(model, 1, workers={"device": "cpu", "replicas": 2}):
        for name in NAMES[:2]:
            for each in made:
                each.set_adapter(name)
            assert largest_difference(model(**text_inputs()).logits, alone(**text_inputs()).logits) <= 1e-4
            assert torch.equal(model.generate(**text_inputs(), **GREEDY), alone.generate(**text_inputs(), **GREEDY))
    assert type(model.model.layers[0].mlp.up_proj.base_layer).__name__ == "Linear8bitLt"


def test_dora_takes_the_norms_of_what_the_integers_stand_for(groups) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
    model, alone = (draw(peft.get_peft_model(each, config)) for each in by_torchao("int8"))
    want = alone(**text_inputs()).logits
    with parallelize(model, workers=groups(2)):
        assert largest_difference(model(**text_inputs()).logits, want) <= 1e-4


@pytest.mark.slow  # more processes that import peft, and all that it finds
def test_a_worker_that_dies() -> None:
    given, plain = by_bitsandbytes("int8")
    model, want = adapted(given), answers(adapted(plain))
    with parallelize(model, 2, workers={"device": "cpu"}):
        model.set_adapter("second")
        kill(deployment_of(given).pids[1])
        await_incarnation(given, 1)
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), want["second"][1])
        agree(answers(model), want)


def test_the_directory_of_an_adapter_over_a_quantized_checkpoint(groups, tmp_path: Path) -> None:
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


def test_a_plan_and_a_refusal_leave_it_as_it_was(groups) -> None:
    model = adapted(by_bitsandbytes("nf4")[0])
    before = kinds(model)
    made = plan(model, 2, quantize=DEQUANTIZE)
    assert made.tensors["model.layers.0.mlp.down_proj.base_layer.weight"].shape == (64, 96)
    with pytest.raises(UnsupportedModelError, match="the LlamaForCausalLM given is quantized by bitsandbytes"):
        parallelize(model, workers=groups(2))
    assert kinds(model) == before
    assert hasattr(model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight, "quant_state")
    assert model.get_base_model().is_quantized


def test_a_trained_copy_of_a_quantized_layer_is_refused(groups) -> None:
    model, _ = by_torchao("int8")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["up_proj"])
    with pytest.raises(UnsupportedModelError, match=r"up_proj.* is quantized, and so is .*modules_to_save\.default"):
        parallelize(peft.get_peft_model(model, config), workers=groups(2))
