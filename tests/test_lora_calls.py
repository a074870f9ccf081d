"""Models with peft's adapters on workers: who computes with which, what is saved, what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from parallelformers_ng import (
    AlreadyParallelizedError,
    ParallelError,
    UnsupportedModelError,
    parallelize,
    plan,
    save_sharded,
)
from parallelformers_ng.model.parallelized import deployment_of
from tests.apart import find_packages
from tests.patience import await_incarnation, kill
from tests.test_lora import GREEDY, adapted, draw
from tests.zoo.build import largest_difference, randomise
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder

find_packages()
import peft  # noqa: E402

NAMES = ("default", "adapter2", "adapter3", "adapter4")


def four_adapters() -> Any:
    """Each has layers of its own, and two have a head."""
    targets = (["q_proj", "down_proj"], ["v_proj", "o_proj"], ["up_proj"], ["embed_tokens", "k_proj"])
    heads = (["lm_head"], None, ["lm_head"], None)
    return adapted(
        decoder("Llama"),
        *(
            peft.LoraConfig(r=3, target_modules=each, modules_to_save=head, task_type="CAUSAL_LM")
            for each, head in zip(targets, heads, strict=True)
        ),
    )


def answers(model: Any) -> dict[str, torch.Tensor]:
    """The greedy tokens of each adapter, and of none."""
    found = {}
    for name in NAMES:
        model.set_adapter(name)
        found[name] = model.generate(**text_inputs(), **GREEDY)
    with model.disable_adapter():
        found["none"] = model.generate(**text_inputs(), **GREEDY)
    assert len({tuple(tokens.flatten().tolist()) for tokens in found.values()}) == len(found)
    return found


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    return answers(four_adapters())


LONG = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
"""So many that a call takes several rounds, and others come meanwhile."""


def one_row() -> dict[str, torch.Tensor]:
    return {name: tensor[:1] for name, tensor in text_inputs().items()}


@pytest.fixture(scope="module")
def long() -> dict[str, torch.Tensor]:
    """What `LONG` gives of one row, with each adapter."""
    alone, found = four_adapters(), {}
    for name in NAMES:
        alone.set_adapter(name)
        found[name] = alone.generate(**one_row(), **LONG)
    return found


@pytest.fixture(scope="module")
def model(groups) -> Iterator[Any]:
    yield (found := parallelize(four_adapters(), workers=groups(2)))
    found.deparallelize()


def same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], want[name]) for name in want)


def test_adapters_by_name_and_none(model, whole) -> None:
    assert type(model).__name__ == "PeftModelForCausalLM"
    assert same(answers(model), whole)
    assert model.active_adapter == NAMES[-1]
    assert isinstance(model, peft.PeftModelForCausalLM)


def test_a_call_names_its_adapter(model, whole) -> None:
    model.set_adapter("adapter2")
    for name in (*NAMES, "none"):
        names = ["__base__" if name == "none" else name] * 2
        assert torch.equal(model.generate(**text_inputs(), **GREEDY, adapter_names=names), whole[name])
    assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole["adapter2"])
    with pytest.raises(ParallelError, match="call once for each"):
        model(**text_inputs(), adapter_names=["default", "adapter2"])
    with pytest.raises(ValueError, match="non-existing"):
        model(**text_inputs(), adapter_names=["adapter9", "adapter9"])
    assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole["adapter2"])


def test_scales(model) -> None:
    alone = four_adapters()
    for each in (alone, model):
        each.set_adapter("default")
        for layer in each.modules():
            if hasattr(layer, "scale_layer"):
                layer.scale_layer(0.25)
    assert largest_difference(model(**text_inputs()).logits, alone(**text_inputs()).logits) <= 1e-4
    for layer in model.modules():
        if hasattr(layer, "scale_layer"):
            layer.unscale_layer(0.25)


def test_a_task_names_its_adapter(model, whole) -> None:

    async def together() -> list[torch.Tensor]:
        calls = (model.agenerate(**one_row(), **GREEDY, adapter_names=[name]) for name in NAMES)
        return await asyncio.gather(*calls)

    for name, tokens in zip(NAMES, asyncio.run(together()), strict=True):
        assert torch.equal(tokens, whole[name][:1])


class _FirstPut(BaseStreamer):
    """Says that a call has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def put(self, value: torch.Tensor) -> None:
        self.begun.set()

    def end(self) -> None:
        self.begun.set()


def switching(model: Any, long: dict[str, torch.Tensor], calls: int) -> None:
    """Eight threads generate, one row each, while each sets its adapter as soon as the call before it has begun."""
    free, answers = threading.Semaphore(8), list[tuple[str, Future[torch.Tensor]]]()
    with ThreadPoolExecutor(8) as threads:
        for number in range(calls):
            name, streamer = NAMES[(number * 7 + number // 5) % 4], _FirstPut()
            assert free.acquire(timeout=60)
            model.set_adapter(name)
            answer = threads.submit(model.generate, **one_row(), **LONG, streamer=streamer)
            answer.add_done_callback(lambda _: free.release())
            assert streamer.begun.wait(60)
            answers.append((name, answer))
    assert all(torch.equal(answer.result(), long[name]) for name, answer in answers)


@pytest.mark.parametrize("batching", [True, False])
def test_adapters_are_switched_while_eight_threads_generate(groups, long, batching: bool) -> None:
    with parallelize(four_adapters(), workers=groups(2), batching=batching) as model:
        switching(model, long, 20)


@pytest.mark.slow
def test_adapters_are_switched_a_thousand_times(groups, long) -> None:
    with parallelize(four_adapters(), workers=groups(2), batching=True) as model:
        switching(model, long, 1000)


def test_calls_that_overlap_are_decoded_each_with_its_adapter(groups, long) -> None:
    """All four are under way before the first one ends."""

    async def together(model: Any) -> list[torch.Tensor]:
        calls = (model.agenerate(**one_row(), **LONG, adapter_names=[name]) for name in (*NAMES, *NAMES))
        return await asyncio.gather(*calls)

    with parallelize(four_adapters(), workers=groups(2), batching=True) as model:
        found = asyncio.run(together(model))
    assert all(torch.equal(tokens, long[name]) for tokens, name in zip(found, (*NAMES, *NAMES), strict=True))


def test_layers_that_come_before_they_run(groups, whole, tmp_path: Path) -> None:
    rooms = {rank: size - 20_000 for rank, size in enumerate(plan(four_adapters(), 2).bytes_per_rank)}
    fit = {"max_memory": {**rooms, "cpu": 0}, "offload_folder": str(tmp_path)}
    with parallelize(four_adapters(), workers=groups(2), fit=fit) as model:
        tiers = model.get_base_model().shard_plan.tiers
        assert tiers is not None
        assert any("disk" in places.values() for places in tiers.places)
        assert same(answers(model), whole)


def test_replicas_compute_each_call_with_its_adapter(whole, long) -> None:
    with parallelize(four_adapters(), 1, workers={"device": "cpu", "replicas": 2}) as model:
        switching(model, long, 12)
        assert same(answers(model), whole)


STAGES = [(2, {"strategy": "pipeline"}), (4, {"strategy": "tensor+pipeline", "tensor": 2})]


@pytest.mark.parametrize(("ranks", "fit"), STAGES)
def test_stages(groups, whole, long, tmp_path: Path, ranks: int, fit: dict[str, Any]) -> None:
    alone = four_adapters()
    with parallelize(four_adapters(), workers=groups(ranks), fit=fit, batching=True) as model:
        assert model.get_base_model().shard_plan.stages == 2
        assert same(answers(model), whole)
        switching(model, long, 12)
        model.save_pretrained(tmp_path / "cut")
        model.set_adapter("adapter3")
    alone.save_pretrained(tmp_path / "alone")
    for file in (tmp_path / "alone").rglob("*.safetensors"):
        want, found = load_file(file), load_file(tmp_path / "cut" / file.relative_to(tmp_path / "alone"))
        assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole["adapter3"])
    assert same(answers(model), whole)


class _Switches(StoppingCriteria):
    """Cannot cross to the workers, so that the loop runs here; sets another adapter at the first token."""

    def __init__(self, model: Any) -> None:
        self.model, self.lock = model, threading.Lock()

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        self.model.set_adapter("adapter3")
        return torch.zeros(len(ids), dtype=torch.bool)


def test_a_loop_in_this_process_goes_on_with_its_adapter(model, whole) -> None:
    model.set_adapter("default")
    tokens = model.generate(**text_inputs(), **GREEDY, stopping_criteria=[_Switches(model)])
    assert torch.equal(tokens, whole["default"])
    assert model.active_adapter == "adapter3"


def of_values() -> Any:
    """Two adapters, which differ in what a token takes from those before it."""
    configs = [peft.LoraConfig(r=8, lora_alpha=64, target_modules=["k_proj", "v_proj"]) for _ in range(2)]
    return adapted(decoder("Llama"), *configs)


def test_what_a_prompt_left_is_not_used_by_another_adapter(groups) -> None:
    """Prompts of a batch that begin alike share what has run of them, if they run with the same adapters."""
    alone, prompt = of_values(), torch.randint(5, 95, (1, 40), generator=torch.Generator().manual_seed(5))
    want = {}
    for name in NAMES[:2]:
        alone.set_adapter(name)
        want[name] = alone.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)
    with parallelize(of_values(), workers=groups(2), batching=True) as model:
        for name in NAMES[:2] * 2:
            model.set_adapter(name)
            assert torch.equal(model.generate(input_ids=prompt, max_new_tokens=12, do_sample=False), want[name])


@pytest.mark.slow  # four more processes that import peft, and all that it finds
def test_a_worker_that_dies(whole) -> None:
    with parallelize(four_adapters(), 2, workers={"device": "cpu"}) as model:
        model.set_adapter("adapter2")
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole["adapter2"])
        kill(deployment_of(model.get_base_model()).pids[1])
        await_incarnation(model.get_base_model(), 1)
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole["adapter2"])
        assert same(answers(model), whole)


def test_saved_files_are_pefts(model, tmp_path: Path) -> None:
    alone = four_adapters()
    alone.save_pretrained(tmp_path / "alone")
    model.save_pretrained(tmp_path / "cut")
    files = sorted(path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*") if path.is_file())
    assert files == sorted(
        path.relative_to(tmp_path / "cut") for path in (tmp_path / "cut").rglob("*") if path.is_file()
    )
    assert len(files) == 9  # a card, and two for each adapter
    for file in files:
        one, other = tmp_path / "alone" / file, tmp_path / "cut" / file
        if file.suffix == ".safetensors":
            tensors = load_file(one)
            assert tensors.keys() == load_file(other).keys()
            assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(other).items())
        else:
            assert one.read_text() == other.read_text()


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
def test_what_would_change_weights_is_refused(model, whole, name: str) -> None:
    modules, names = list(model.named_modules()), list(model.peft_config)
    with pytest.raises(ParallelError, match=r"deparallelize\(\) first"):
        getattr(model, name)(*REFUSED[name])
    with pytest.raises(ParallelError, match=r"deparallelize\(\) first"):
        model.get_base_model().model.layers[0].self_attn.q_proj.merge()
    assert list(model.named_modules()) == modules
    assert list(model.peft_config) == names


def test_what_is_no_adapter_in_a_model_is_refused_by_name() -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UnsupportedModelError, match="PREFIX_TUNING"):
        parallelize(peft.get_peft_model(decoder("Llama"), config), 2)


def test_a_sharded_directory_is_refused(model, tmp_path: Path) -> None:
    with pytest.raises(ParallelError, match="adapters"):
        save_sharded(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_with_an_adapter(groups, tmp_path: Path) -> None:
    """Its base is read by the ranks, as of any path."""
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
        held = model.get_base_model().shard_plan
        assert held.quantized
        assert {tensor.dtype for name, tensor in held.tensors.items() if "lora" in name} == {torch.bfloat16}
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


# -- adapters that transformers has put in --------------------------------------------------------------------------


def with_transformers(*names: str) -> Any:
    model = decoder("Llama")
    for number, name in enumerate(names):
        config = peft.LoraConfig(r=2 + number, target_modules=["q_proj", "down_proj"])
        model.add_adapter(config, adapter_name=name)
    return randomise(model, seed=4).eval()


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
        found = []
        for name in ("one", "two"):
            each.set_adapter(name)
            assert each.active_adapters() == [name]
            found.append(each(**text_inputs()).logits)
        each.disable_adapters()
        found.append(each(**text_inputs()).logits)
        each.enable_adapters()
        found.append(each(**text_inputs()).logits)
        outputs.append(found)
    assert all(largest_difference(one, other) <= 1e-4 for one, other in zip(*outputs, strict=True))
    assert largest_difference(outputs[0][0], outputs[0][1]) > 1e-2
    model.deparallelize()
    assert largest_difference(model(**text_inputs()).logits, outputs[0][1]) <= 1e-6


def test_a_merged_model(groups) -> None:
    model = four_adapters().merge_and_unload()
    want = model.generate(**text_inputs(), **GREEDY)
    with parallelize(model, workers=groups(2)):
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), want)
