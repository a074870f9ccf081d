"""Tests models with peft's adapters on workers: saving, `deparallelize`, quantization and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from parallelformers_ng import (
    AlreadyParallelizedError,
    ParallelError,
    UnsupportedModelError,
    parallelize,
    plan,
    save_sharded,
)
from tests.helpers.adapters import GREEDY, NAMES, adapters_of_transformers, answers, draw, four_adapters, same
from tests.helpers.apart import find_packages
from tests.zoo.build import largest_difference, randomise
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder

find_packages()
import peft  # noqa: E402


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    return answers(four_adapters())


@pytest.fixture(scope="module")
def model(groups) -> Iterator[Any]:
    yield (parallel := parallelize(four_adapters(), workers=groups(2)))
    parallel.deparallelize()


def test_saved_files_are_pefts(model, tmp_path: Path) -> None:
    alone = four_adapters()
    alone.save_pretrained(tmp_path / "alone")
    model.save_pretrained(tmp_path / "cut")
    files = sorted(path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*") if path.is_file())
    assert files == sorted(
        path.relative_to(tmp_path / "cut") for path in (tmp_path / "cut").rglob("*") if path.is_file()
    )
    assert len(files) == 9  # a card, and two files per adapter
    for file in files:
        one, other = tmp_path / "alone" / file, tmp_path / "cut" / file
        if file.suffix == ".safetensors":
            tensors = load_file(one)
            assert tensors.keys() == load_file(other).keys()
            assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(other).items())
        else:
            assert one.read_text() == other.read_text()


def test_unknown_adapter_is_not_saved_but_named(model, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"current supported adapter names are .* got \['nobody'\]"):
        model.save_pretrained(tmp_path, selected_adapters=["nobody"])
    assert not list(tmp_path.iterdir())


def test_the_state_dict(model) -> None:
    want, got = four_adapters().state_dict(), model.state_dict()
    assert list(got) == list(want)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_deparallelize(groups, whole) -> None:
    model = four_adapters()
    classes = [type(module) for module in model.modules()]
    parallelize(model, workers=groups(2)).set_adapter("adapter2")
    model.deparallelize()
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole["adapter2"])
    assert same(answers(model), whole)


def test_an_exception_leaves_the_with(groups) -> None:
    with pytest.raises(KeyError, match="of the caller"), parallelize(four_adapters(), workers=groups(2)) as model:
        raise KeyError("of the caller")
    assert not hasattr(model.get_base_model(), "shard_plan")


REFUSED = {
    "merge_and_unload": (),
    "unload": (),
    "merge_adapter": (),
    "unmerge_adapter": (),
    "delete_adapter": ("default",),
    "add_adapter": ("more", peft.LoraConfig(target_modules=["q_proj"])),
    "load_adapter": ("somewhere", "more"),
    "add_weighted_adapter": (["default", "adapter2"], [0.5, 0.5], "more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_changes_of_weights_are_refused(model, whole, name: str) -> None:
    modules, names = list(model.named_modules()), list(model.peft_config)
    with pytest.raises(ParallelError, match=r"deparallelize\(\) first"):
        getattr(model, name)(*REFUSED[name])
    with pytest.raises(ParallelError, match=r"deparallelize\(\) first"):
        model.get_base_model().model.layers[0].self_attn.q_proj.merge()
    assert list(model.named_modules()) == modules
    assert list(model.peft_config) == names


def test_prompt_learning_is_refused_by_name() -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UnsupportedModelError, match="PREFIX_TUNING"):
        parallelize(peft.get_peft_model(decoder("Llama"), config), 2)


def test_a_sharded_directory_is_refused(model, tmp_path: Path) -> None:
    with pytest.raises(ParallelError, match="adapters"):
        save_sharded(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_with_an_adapter(groups, tmp_path: Path) -> None:
    """The ranks read the adapter's base model like a model from any path."""
    base = decoder("Llama")
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    alone = draw(peft.get_peft_model(base, config))
    alone.save_pretrained(tmp_path / "adapter")
    with parallelize(tmp_path / "adapter", workers=groups(2), dtype="float32") as model:
        assert isinstance(model, peft.PeftModelForCausalLM)
        assert largest_difference(model(**text_inputs()).logits, alone(**text_inputs()).logits) <= 1e-4
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), alone.generate(**text_inputs(), **GREEDY))
        with model.disable_adapter(), alone.disable_adapter():
            assert largest_difference(model(**text_inputs()).logits, alone(**text_inputs()).logits) <= 1e-4


def test_twice(model) -> None:
    with pytest.raises(AlreadyParallelizedError):
        parallelize(model, 2)


def test_the_plan_of_a_peft_model() -> None:
    model = four_adapters()
    assert plan(model, 2).as_dict() == plan(model.get_base_model(), 2).as_dict()


def test_cast_and_quantized(groups) -> None:
    model = four_adapters()
    with parallelize(model, workers=groups(2), quantize="int8", dtype="bfloat16") as model:
        shard_plan = model.get_base_model().shard_plan
        assert shard_plan.quantized
        assert {tensor.dtype for name, tensor in shard_plan.tensors.items() if "lora" in name} == {torch.bfloat16}
        logits = {}
        for name in NAMES:
            model.set_adapter(name)
            logits[name] = model(**text_inputs()).logits.float()
    alone = four_adapters()
    for name in NAMES:
        alone.set_adapter(name)
        want = alone(**text_inputs()).logits
        assert largest_difference(logits[name], want) < 0.1
        assert all(largest_difference(logits[other], want) > 0.2 for other in NAMES if other != name)


# -- adapters added by transformers ---------------------------------------------------------------------------------


def with_transformers(*names: str) -> Any:
    model = decoder("Llama")
    for number, name in enumerate(names):
        config = peft.LoraConfig(r=2 + number, target_modules=["q_proj", "down_proj"])
        model.add_adapter(config, adapter_name=name)
    return randomise(model, seed=4).eval()


@adapters_of_transformers
def test_adapters_of_transformers(groups, tmp_path: Path) -> None:
    alone, model = with_transformers("one", "two"), with_transformers("one", "two")
    parallelize(model, workers=groups(2))
    for each in (alone, model):
        each.set_adapter("one")
        each.save_pretrained(tmp_path / ("alone" if each is alone else "cut"))
    want, got = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("alone", "cut"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    outputs = []
    for each in (alone, model):
        logits = []
        for name in ("one", "two"):
            each.set_adapter(name)
            assert each.active_adapters() == [name]
            logits.append(each(**text_inputs()).logits)
        each.disable_adapters()
        logits.append(each(**text_inputs()).logits)
        each.enable_adapters()
        logits.append(each(**text_inputs()).logits)
        outputs.append(logits)
    assert all(largest_difference(one, other) <= 1e-4 for one, other in zip(*outputs, strict=True))
    assert largest_difference(outputs[0][0], outputs[0][1]) > 1e-2
    model.deparallelize()
    assert largest_difference(model(**text_inputs()).logits, outputs[0][1]) <= 1e-6


def test_a_merged_model(groups) -> None:
    model = four_adapters().merge_and_unload()
    want = model.generate(**text_inputs(), **GREEDY)
    with parallelize(model, workers=groups(2)):
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), want)
