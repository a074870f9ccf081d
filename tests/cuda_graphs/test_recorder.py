"""Tests recorders of steps, their checks before recording, and the messages of calls without a recording."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import StaticCache

from parallelformers_ng import parallelize
from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import SingleCommunicator
from parallelformers_ng.collectives.process_group import GlooCommunicator
from parallelformers_ng.collectives.shared_memory import StagedCommunicator
from parallelformers_ng.cuda_graphs.captured import CapturedSteps
from parallelformers_ng.cuda_graphs.modes import CAPTURED, CAPTURED_BY_DEFAULT, NO_DEVICE, static_generation
from parallelformers_ng.cuda_graphs.recorder import CaptureCheck, KeptAlive, StepArguments, Uncapturable
from parallelformers_ng.cuda_graphs.static_caches import ReusableCache, bucket_of, handed_out, unsupported_layer
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.hooks.installed import InstalledHooks
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.sharding import look_ups
from parallelformers_ng.worker import runner
from parallelformers_ng.worker.runner import ModelRunner
from tests.helpers.operator_recorder import OperatorRecorder
from tests.zoo.case import text_inputs, token_ids
from tests.zoo.decoders import decoder
from tests.zoo.recent import LLAMA4
from tests.zoo.seq2seq import t5

HOW: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def test_missing_device_is_reported_once(
    groups: Callable[[int], WorkerGroup], caplog: pytest.LogCaptureFixture
) -> None:
    whole, inputs = decoder("Llama"), text_inputs()
    with (
        caplog.at_level(logging.WARNING),
        parallelize(decoder("Llama"), workers=groups(2), decode="cuda_graphs") as model,
    ):
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, **HOW), whole.generate(**inputs, **HOW))
    said = [record.message for record in caplog.records if "CUDA" in record.message]
    assert said == [f"generate runs without CUDA graphs: {NO_DEVICE}"]


def test_arguments() -> None:
    with pytest.raises(ParallelError, match="decode is 'yes'; it takes 'auto', 'eager', 'compile', 'cuda_graphs'"):
        parallelize(decoder("Llama"), 2, workers={"device": "cpu"}, decode="yes")  # type: ignore[arg-type]
    assert "two caches" in static_generation(t5(), {}, CAPTURED)[1]
    changed, reason = static_generation(decoder("Llama"), {"disable_compile": False}, CAPTURED)
    assert (changed, reason) == ({"cache_implementation": "static", "disable_compile": True}, "")


def test_chunked_attention_is_captured_if_masks_exist() -> None:
    """transformers 5.17 raises an error for a static cache, so calls have none there."""
    model, arguments = decoder("Llama4Text", width=40, **LLAMA4), {**text_inputs(), **HOW}
    assert torch.equal(model.generate(**static_generation(model, arguments, CAPTURED)[0]), model.generate(**arguments))


def test_long_caches_are_made_on_explicit_request() -> None:
    """Each step reads the whole of a fixed-size cache, also its unused part."""
    model, ids = decoder("Llama"), torch.ones(4, 96, dtype=torch.long)
    for length in ({"max_new_tokens": 4000}, {"max_length": 4096}):
        assert not static_generation(model, {"input_ids": ids, **length}, CAPTURED_BY_DEFAULT)[1]
        beams = {"inputs": ids, **length, "num_beams": 2}
        reason = static_generation(model, beams, CAPTURED_BY_DEFAULT)[1]
        assert reason == "each step would read a cache of 32768 positions, also empty ones; the limit is 16384"
        assert not static_generation(model, beams, CAPTURED)[1]


@pytest.mark.parametrize(
    ("step", "finding"),
    [
        (lambda x: x.sum().item(), "aten._local_scalar_dense waits"),
        (lambda x: bool((x > 0).any()), "aten._local_scalar_dense waits"),
        (lambda x: x.nonzero(), "aten.nonzero waits"),
        (lambda x: x[x > 0], "aten.index by a mask"),
        (lambda x: torch.empty(3, device="meta")[torch.arange(1)], "aten.index by a tensor on the host"),
        (lambda x: x.masked_select(x > 0), "aten.masked_select waits"),
        (lambda x: x.repeat_interleave(torch.arange(3), 0), "aten.repeat_interleave waits"),
        (lambda x: x[[0, 2]], "made of Python numbers"),
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), "made of Python numbers"),
        (lambda x: torch.where(x > 0, x, torch.tensor(-1.0)), ""),
        (lambda x: x.index_select(0, torch.arange(2)).masked_fill(x[:2] > 0, 0).double().softmax(-1), ""),
    ],
)
def test_capture_check_names_operators_that_wait(step: Callable[[torch.Tensor], Any], finding: str) -> None:
    with torch.inference_mode():
        x = torch.randn(3, 3)
        with CaptureCheck() as check:
            step(x)
    assert check.found.startswith(finding) if finding.startswith("aten") else finding in check.found
    assert bool(check.found) is bool(finding)


def test_recordings_are_dropped_before_their_connections() -> None:
    order: list[str] = []

    class Connected(GlooCommunicator):
        def _new_group(self, store: Any) -> Any:
            return SimpleNamespace(abort=lambda: order.append("aborted"))

    communicator = Connected(0, 2, torch.distributed.HashStore(), 1.0, Arena.create(2))
    communicator.before_reset(lambda: order.append("forgotten"))
    communicator.reset()
    communicator.close()
    assert order == ["forgotten", "aborted"] * 2


Make = Callable[[Any], ModelRunner]


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes a rank of a device in this process, which does not become a worker."""
    monkeypatch.setattr(runner, "install", lambda device: None)
    return lambda communicator: ModelRunner(0, 1, torch.device("cuda"), communicator, None)


def test_sums_through_host_memory_are_in_no_graph(on_a_device: Make) -> None:
    host: Any = SingleCommunicator(Arena.create(1))
    replica = on_a_device(StagedCommunicator(host))
    assert replica.recorder() == "StagedCommunicator exchanges through host memory, which a CUDA graph cannot contain"


def test_out_of_memory_releases_captured_steps(on_a_device: Make) -> None:
    """Running out of memory releases the memory of captured steps, for every kind of request."""
    alone = SingleCommunicator(Arena.create(1))
    replica = on_a_device(alone)
    replica.hooks = InstalledHooks(torch.nn.Module(), lambda cache: cache)
    captured = replica.rank_state.steps["call"] = CapturedSteps(OperatorRecorder(), alone)  # type: ignore[arg-type]
    released: list[bool] = []
    for error, kept in ((ValueError, 1), (torch.OutOfMemoryError, 0)):
        captured._caches[1] = SimpleNamespace(release=lambda: released.append(True))  # type: ignore[assignment]
        with pytest.raises(error), replica._on_device([], {}):
            raise error
        assert len(captured._caches) == kept == 1 - len(released)


def test_recorder_follows_the_rules_of_a_graph() -> None:
    """Recording computes nothing. A replay reads the present contents of memory, and runs no Python."""
    recorder, values, total, seen = OperatorRecorder(), torch.ones(3), torch.zeros(3), [1.0]

    def step() -> torch.Tensor:
        total.add_(values * seen[0])
        return total.view(3, 1).exp()

    output, graph = recorder.record(step)
    assert total.tolist() == [0, 0, 0]
    seen[0] = 100.0
    graph.replay()
    values.fill_(2)
    graph.replay()
    assert total.tolist() == [3, 3, 3]
    torch.testing.assert_close(output, torch.full((3, 1), 3.0).exp())
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(lambda: total.add_(1).sum().item())
    assert total.tolist() == [3, 3, 3]


def test_tensors_addressed_by_a_graph_are_kept() -> None:
    """The recorder keeps tensors from outside that the graph reads or writes, but no tensors that the graph makes."""
    values, total, constant = torch.ones(2, 2), torch.zeros(2), torch.full((2,), 3.0)
    part = values[1]
    with torch.inference_mode(), KeptAlive() as kept:
        total.add_((part * constant).view(2).exp())
        total.view(1, 2).sum()
    storages = {tensor.untyped_storage().data_ptr() for tensor in kept.tensors.values()}
    assert storages == {tensor.untyped_storage().data_ptr() for tensor in (values, total, constant)}


def test_arguments_are_padded_if_their_batch_is_known() -> None:
    ids, mask = torch.arange(3).view(3, 1), torch.ones(3, 1, 1, 8, dtype=torch.bool)
    cache = object()
    arguments_by_name = {
        "input_ids": ids,
        "attention_mask": {"full": mask, "none": None},
        "past_key_values": cache,
        "use": True,
    }
    arguments = StepArguments(arguments_by_name, cache)
    assert arguments.can_be_padded
    first, second = arguments.buffers(4)
    assert first.tolist() == [[0], [0], [0], [0]]  # the values are copied in before every run
    assert second.shape == (4, 1, 1, 8)
    put = arguments.with_tensors([first, second])
    assert put["attention_mask"] == {"full": second, "none": None}
    assert put["past_key_values"] is cache
    assert arguments.key(4) == StepArguments({**arguments_by_name, "input_ids": ids + 5}, cache).key(4)
    assert arguments.key(4) != StepArguments({**arguments_by_name, "use": False}, cache).key(4)
    square = {**arguments_by_name, "position_ids": torch.zeros(3, 3, 1)}  # which dimension is the batch?
    assert not StepArguments(square, cache).can_be_padded
    with pytest.raises(Uncapturable, match="the argument encoder_outputs of a step is a tuple"):
        StepArguments({**arguments_by_name, "encoder_outputs": (ids,)}, cache)


def test_memory_stays_from_call_to_call() -> None:
    config = decoder("Mistral", sliding_window=4).config
    kept = ReusableCache(StaticCache(config, 16), 16)
    places = set()
    for rows, tokens in ((3, 3), (4, 2), (1, 1)):
        cache = kept.renew()
        assert not kept.is_begun
        new = torch.ones(rows, 2, tokens, 8)
        for layer in range(2):
            keys, values = cache.update(new, new, layer)
            assert keys.shape[0] == rows
            assert keys.sum() == values.sum() == new.sum()  # the values of the last call are gone
        places.add(tuple(layer.whole[0].data_ptr() for layer in kept.layers))
        kept.steps[rows] = "recorded"
    assert len(places) == 1
    assert kept.rows == 4
    assert kept.steps.keys() == {3, 4, 1}
    copied = handed_out(kept.cache)
    assert unsupported_layer(copied) == ""
    assert copied.layers[0].keys.data_ptr() not in places.pop()
    kept.renew()
    kept.cache.update(torch.ones(5, 2, 2, 8), torch.ones(5, 2, 2, 8), 0)
    assert not kept.steps, "the recording used other memory"
    assert [bucket_of(rows) for rows in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 16]


@pytest.mark.parametrize("rows", [2, 3], ids=["full bucket", "padded"])
def test_replays_read_the_arguments_of_their_step(rows: int) -> None:
    model, steps = decoder("Llama"), 8
    arguments = {"input_ids": token_ids(rows), "max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}
    want = model.generate(**arguments)
    captured = CapturedSteps(OperatorRecorder(), SingleCommunicator(Arena.create(1)))  # type: ignore[arg-type]
    with torch.inference_mode(), captured.capturing(model):
        assert torch.equal(model.generate(**static_generation(model, arguments, CAPTURED)[0]), want)
    assert captured.reason == "", "the recording was given up"
    assert (captured.recorder.recordings, captured.recorder.replays) == (1, steps - 2)  # type: ignore[attr-defined]


def test_compilers_tensors_are_not_checked() -> None:
    """The compiler runs look-ups on fake tensors after it has stopped to say that it compiles."""
    with FakeTensorMode():
        table, ids = torch.empty(4, 2, device="cuda"), torch.zeros(3, dtype=torch.long, device="cuda")
        assert look_ups._guarded(ids, table).shape == (3, 2)
    assert not look_ups._seen
