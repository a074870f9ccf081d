"""Tests the code path of CUDA devices. Without a device the tests are skipped; `make gpu` runs them on a GPU."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from parallelformers_ng import parallelize, start_group
from parallelformers_ng.cuda_graphs.recorder import CudaRecorder
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers.patience import await_incarnation, kill
from tests.zoo.build import largest_difference
from tests.zoo.case import text_inputs
from tests.zoo.decoders import GEMMA3, decoder, gpt2
from tests.zoo.seq2seq import t5

ABSENT = not torch.cuda.is_available() and "PARALLELFORMERS_TESTS_NEED_GPU" not in os.environ
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ABSENT, reason="needs a CUDA device")]


def _without_ties(whole: PreTrainedModel, tokens: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return inputs, and the greedy tokens of a model on the CPU.

    No token was a close decision, because a device rounds sums otherwise than the CPU does.
    """
    mask = text_inputs()["attention_mask"]
    for seed in range(100):
        ids = torch.randint(3, 128, mask.shape, generator=torch.Generator().manual_seed(seed))
        inputs = {"input_ids": ids, "attention_mask": mask}
        how = {"max_new_tokens": tokens, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
        output = whole.generate(**inputs, **how)
        best, second = torch.stack(output.scores).topk(2).values.unbind(-1)
        if (best - second).min() > 1e-2:
            return inputs, output.sequences
    raise AssertionError("each prompt has a close decision")


@pytest.fixture(scope="module")
def groups() -> Iterator[Callable[[int], WorkerGroup]]:
    """Yield `groups(world_size)`: ranks on the first device, shared by tests, because a start takes seconds."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def get(world_size: int) -> WorkerGroup:
            backend = "shared_memory" if world_size > 1 else "auto"
            options = {"device": "cuda", "device_ids": [0] * world_size, "backend": backend}
            return stack.enter_context(start_group(world_size, **options))

        yield get


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("make", [lambda: decoder("Llama"), gpt2, t5], ids=["llama", "gpt2", "t5"])
def test_parity_on_one_device(make, world_size: int, groups: Callable[[int], WorkerGroup]) -> None:
    """Two ranks share the device, and sums go through host memory: tests/devices/one_card has ranks over NCCL."""
    model = make()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs, want = _without_ties(model, 8)
    parallelize(model, workers=groups(world_size))
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), want)
    assert all(device == "cuda:0" and used > 0 for device, used in model.memory_allocated().items())
    model.cpu()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_compiled_steps() -> None:
    """With the compiler's defaults, one rank's step becomes a CUDA graph."""
    inputs, want = _without_ties(decoder("Llama"), 16)
    with parallelize(decoder("Llama"), 1, workers={"device": "cuda"}, decode="compile") as model:
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, max_new_tokens=16, do_sample=False), want)


FAMILIES = {
    "llama": lambda: decoder("Llama"),
    "qwen3": lambda: decoder("Qwen3"),
    "gpt2": gpt2,
    "window": lambda: decoder("Mistral", sliding_window=12),
    "windows": lambda: decoder("Gemma3Text", tied=True, **GEMMA3),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps(family: str, groups: Callable[[int], WorkerGroup], caplog: pytest.LogCaptureFixture) -> None:
    """The calls are greedy, with beams, and with prompts of other lengths and batch sizes. A step without a graph would
    log a warning."""
    whole = FAMILIES[family]()
    with (
        parallelize(FAMILIES[family](), workers=groups(1), decode="cuda_graphs") as model,
        caplog.at_level(logging.WARNING, "parallelformers_ng"),
    ):
        for length, rows, beams in ((7, 2, 1), (3, 2, 1), (9, 3, 1), (5, 4, 1), (7, 2, 3), (1, 1, 1)):
            ids = torch.arange(rows * length).view(rows, length).remainder(128) + 3
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "num_beams": beams}
            assert torch.equal(model.generate(**inputs, **options), whole.generate(**inputs, **options))
    assert not caplog.records


@pytest.mark.parametrize("family", ["llama", "gpt2", "window"])
def test_callers_share_captured_steps(
    family: str, groups: Callable[[int], WorkerGroup], caplog: pytest.LogCaptureFixture
) -> None:
    """Rows come and go, so steps have 1 to 8 rows. Later bursts begin with prompts that earlier bursts left behind."""
    whole, specs = FAMILIES[family](), []
    for number in range(12):
        ids = torch.arange(2 + number % 7)[None].mul(5 + number).remainder(128) + 3
        new = 9 + 4 * number % 25
        specs.append({"input_ids": ids, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False})
    want = [whole.generate(**call) for call in specs]
    with (
        parallelize(FAMILIES[family](), workers=groups(1), batching={"rows": 8}) as model,
        caplog.at_level(logging.WARNING, "parallelformers_ng"),
        ThreadPoolExecutor(len(specs)) as pool,
    ):
        for _ in range(5):
            assert all(map(torch.equal, pool.map(lambda call: model.generate(**call), specs), want))
    assert not [record for record in caplog.records if record.name.startswith("parallelformers_ng")]


def _waiting(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _FEED_FORWARD(self, x + 0 * x.sum().item())


_FEED_FORWARD = LlamaMLP.forward


def test_sampling_continues_without_a_capture(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of this model reads a number from the device. The call must continue, whether the check before recording
    finds the read or the capture fails."""
    monkeypatch.setattr(LlamaMLP, "forward", _waiting)
    model = parallelize(decoder("Llama"), 1, workers={"device": "cuda"}, decode="cuda_graphs")
    with model, caplog.at_level(logging.WARNING, "parallelformers_ng"):
        for _ in range(2):
            model.generate(**text_inputs(), max_new_tokens=8, do_sample=True)
    assert [record.message for record in caplog.records] == [
        "generate runs without CUDA graphs: aten._local_scalar_dense waits for the device"
    ]


def test_a_failed_capture_leaves_the_device_usable() -> None:
    device = torch.device("cuda", 0)
    recorder, total = CudaRecorder(device), torch.zeros(4, device=device)
    stream = torch.cuda.current_stream(device)
    with pytest.raises(Exception, match="captur"):
        recorder.record(lambda: total.add_(1).sum().item())
    assert torch.cuda.current_stream(device) == stream
    assert torch.rand(3, device=device).shape == (3,)
    output, graph = recorder.record(lambda: total.add_(1).sum())
    assert total.tolist() == [0, 0, 0, 0]
    graph.replay()
    graph.replay()
    assert (total.tolist(), output.item()) == ([2, 2, 2, 2], 8)


def test_ranks_that_exchange_through_the_host_capture_nothing(
    groups: Callable[[int], WorkerGroup], caplog: pytest.LogCaptureFixture
) -> None:
    model = parallelize(decoder("Llama"), workers=groups(2), decode="cuda_graphs")
    inputs, want = _without_ties(decoder("Llama"), 8)
    with model, caplog.at_level(logging.WARNING, "parallelformers_ng"):
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), want)
    assert ["through host memory" in record.message for record in caplog.records] == [True]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_captured_steps_with_nccl(caplog: pytest.LogCaptureFixture) -> None:
    inputs, want = _without_ties(decoder("Llama"), 16)
    with (
        parallelize(decoder("Llama"), 2, workers={"device": "cuda"}, decode="cuda_graphs") as model,
        caplog.at_level(logging.WARNING, "parallelformers_ng"),
    ):
        for rows in (2, 1, 2):
            some = {name: tensor[:rows] for name, tensor in inputs.items()}
            assert torch.equal(model.generate(**some, max_new_tokens=16, do_sample=False), want[:rows])
    assert not caplog.records


def test_half_precision_and_a_restart() -> None:
    """Padding is not compared: a token of it attends to nothing, and its fp16 logits in transformers are not those in
    fp32."""
    whole, model = decoder("Llama").half().cuda(), decoder("Llama")
    mask = text_inputs()["attention_mask"].bool()
    with torch.no_grad():
        want = whole(**{name: tensor.cuda() for name, tensor in text_inputs().items()}).logits.float().cpu()[mask]
    parallelize(model, 1, fp16=True, workers={"device": "cuda", "host_copy": True})
    assert largest_difference(model(**text_inputs()).logits.float()[mask], want) <= 2e-2
    kill(deployment_of(model).pids[0])
    await_incarnation(model, 1)
    assert largest_difference(model(**text_inputs()).logits.float()[mask], want) <= 2e-2
    model.cuda()
    assert model.device.type == "cuda"
    assert model.dtype == torch.float16
