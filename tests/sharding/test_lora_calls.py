"""Tests models with peft's adapters on workers: each call computes with its own adapter."""

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
    ParallelError,
    parallelize,
    plan,
)
from parallelformers_ng.model.parallelized import deployment_of
from tests.helpers.adapters import GREEDY, NAMES, adapted, answers, four_adapters, same
from tests.helpers.apart import find_packages
from tests.helpers.patience import await_incarnation, kill
from tests.zoo.build import largest_difference
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder

find_packages()
import peft  # noqa: E402


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    return answers(four_adapters())


LONG = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
"""Enough tokens for several rounds, so that other calls come in between."""


def one_row() -> dict[str, torch.Tensor]:
    return {name: tensor[:1] for name, tensor in text_inputs().items()}


@pytest.fixture(scope="module")
def long() -> dict[str, torch.Tensor]:
    """Return the tokens of one row with the options `LONG`, for each adapter."""
    alone, tokens = four_adapters(), {}
    for name in NAMES:
        alone.set_adapter(name)
        tokens[name] = alone.generate(**one_row(), **LONG)
    return tokens


@pytest.fixture(scope="module")
def model(groups) -> Iterator[Any]:
    yield (parallel := parallelize(four_adapters(), workers=groups(2)))
    parallel.deparallelize()


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
    with pytest.raises(ParallelError, match="make a call per adapter"):
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
    """A streamer that signals the start of a call."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def put(self, value: torch.Tensor) -> None:
        self.begun.set()

    def end(self) -> None:
        self.begun.set()


def switching(model: Any, long: dict[str, torch.Tensor], calls: int) -> None:
    """Generate in eight threads, one row each; each thread sets its adapter once the previous call has begun."""
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


@pytest.mark.parametrize("batching", [pytest.param(False, marks=pytest.mark.slow), True])
def test_adapters_are_switched_while_eight_threads_generate(groups, long, batching: bool) -> None:
    with parallelize(four_adapters(), workers=groups(2), batching=batching) as model:
        switching(model, long, 20)


@pytest.mark.slow
def test_adapters_are_switched_a_thousand_times(groups, long) -> None:
    with parallelize(four_adapters(), workers=groups(2), batching=True) as model:
        switching(model, long, 1000)


def test_overlapping_calls_keep_their_adapters(groups, long) -> None:
    """Calls of all adapters are running before the first call ends."""

    async def together(model: Any) -> list[torch.Tensor]:
        calls = (model.agenerate(**one_row(), **LONG, adapter_names=[name]) for name in (*NAMES, *NAMES))
        return await asyncio.gather(*calls)

    with parallelize(four_adapters(), workers=groups(2), batching=True) as model:
        outputs = asyncio.run(together(model))
    assert all(torch.equal(tokens, long[name]) for tokens, name in zip(outputs, (*NAMES, *NAMES), strict=True))


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


STAGES = [
    (2, {"strategy": "pipeline"}),
    pytest.param(4, {"strategy": "tensor+pipeline", "tensor": 2}, marks=pytest.mark.slow),
]


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
        want, saved = load_file(file), load_file(tmp_path / "cut" / file.relative_to(tmp_path / "alone"))
        assert all(torch.equal(saved[name], tensor) for name, tensor in want.items())
    assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole["adapter3"])
    assert same(answers(model), whole)


class _Switches(StoppingCriteria):
    """A criterion that makes the generation loop run in this process, and sets another adapter at the first token."""

    def __init__(self, model: Any) -> None:
        self.model, self.lock = model, threading.Lock()

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        self.model.set_adapter("adapter3")
        return torch.zeros(len(ids), dtype=torch.bool)


def test_local_loop_keeps_its_adapter(model, whole) -> None:
    model.set_adapter("default")
    tokens = model.generate(**text_inputs(), **GREEDY, stopping_criteria=[_Switches(model)])
    assert torch.equal(tokens, whole["default"])
    assert model.active_adapter == "adapter3"


def of_values() -> Any:
    """Return a model with two adapters of the key and value layers, so that the adapters' caches differ."""
    configs = [peft.LoraConfig(r=8, lora_alpha=64, target_modules=["k_proj", "v_proj"]) for _ in range(2)]
    return adapted(decoder("Llama"), *configs)


def test_prefix_of_another_adapter_is_not_used(groups) -> None:
    """Prompts of a batch share the computed prefix only if their adapters are equal."""
    alone, prompt = of_values(), torch.randint(5, 95, (1, 40), generator=torch.Generator().manual_seed(5))
    want = {}
    for name in NAMES[:2]:
        alone.set_adapter(name)
        want[name] = alone.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)
    with parallelize(of_values(), workers=groups(2), batching=True) as model:
        for name in NAMES[:2] * 2:
            model.set_adapter(name)
            assert torch.equal(model.generate(input_ids=prompt, max_new_tokens=12, do_sample=False), want[name])


@pytest.mark.slow  # four more processes that import peft and its optional packages
def test_adapters_survive_a_worker_death(whole) -> None:
    with parallelize(four_adapters(), 2, workers={"device": "cpu"}) as model:
        model.set_adapter("adapter2")
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole["adapter2"])
        kill(deployment_of(model.get_base_model()).pids[1])
        await_incarnation(model.get_base_model(), 1)
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole["adapter2"])
        assert same(answers(model), whole)
