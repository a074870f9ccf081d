"""Tests `parallelize(decode="cuda_graphs")`: recorded steps give the same tokens, are recorded once, and are replaced
if necessary.

On the CPU, the recorded operators of a step replace a CUDA graph: see `operator_recorder.py`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from parallelformers_ng import api, parallelize
from parallelformers_ng.cuda_graphs.modes import CAPTURED
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.worker.preload import IMPORTS
from tests.helpers.apart import find_packages
from tests.zoo.build import randomise
from tests.zoo.case import text_inputs, token_ids
from tests.zoo.decoders import GEMMA3, decoder, gpt2

find_packages()  # before the workers start: one test has adapters
STEPS = 12
HOW: dict[str, Any] = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
REPLAYS = STEPS - 2  # the prompt's pass gives the first token, and the first step is not recorded


@pytest.fixture(scope="module")
def recorded_groups() -> Iterator[Callable[[int], WorkerGroup]]:
    """Yield a function that returns the group of a world size, whose workers record operators."""
    running: dict[int, WorkerGroup] = {}

    def get(world_size: int) -> WorkerGroup:
        if world_size not in running:
            running[world_size] = WorkerGroup(
                world_size,
                target="tests.helpers.captured_target:RecordedRunner",
                imports=IMPORTS,
                threads=1,
                timeout=60,
            )
        return running[world_size]

    yield get
    for group in running.values():
        group.close()


@pytest.fixture(params=[1, 2], ids=lambda size: f"ranks{size}")
def group(request: pytest.FixtureRequest, recorded_groups: Callable[[int], WorkerGroup]) -> WorkerGroup:
    return recorded_groups(request.param)


@pytest.fixture
def pair(recorded_groups: Callable[[int], WorkerGroup]) -> WorkerGroup:
    return recorded_groups(2)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `parallelize` choose the decode mode of a CUDA device."""
    monkeypatch.setattr(api, "static_steps", lambda *_: (CAPTURED, ""))


@contextlib.contextmanager
def recorded(model: PreTrainedModel, group: WorkerGroup) -> Iterator[Any]:
    count(group)
    with parallelize(model, workers=group, decode="cuda_graphs") as cut:
        yield cut


def count(group: WorkerGroup) -> tuple[int, int]:
    """Return the number of recordings and of replays since the last call, equal on all ranks."""
    counts = group.call_each("counted", [()] * group.world_size)
    assert len(set(counts)) == 1
    return counts[0]


def padded(*lengths: int) -> dict[str, Any]:
    """Return prompts of given lengths, padded on the left."""
    longest = max(lengths)
    ids, mask = token_ids(len(lengths), longest, seed=sum(lengths)), torch.ones(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, : longest - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: decoder("Llama"),
    "qwen3": lambda: decoder("Qwen3"),
    "gpt2": gpt2,
    "mistral": lambda: decoder("Mistral", sliding_window=4),
    "gemma3": lambda: decoder("Gemma3Text", tied=True, **GEMMA3),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_as_whole(group: WorkerGroup, family: str, caplog: pytest.LogCaptureFixture) -> None:
    whole, inputs = FAMILIES[family](), text_inputs()
    ways: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}]
    with recorded(FAMILIES[family](), group) as model, caplog.at_level(logging.WARNING, "parallelformers_ng"):
        for way in ways:
            options = {**HOW, **way}
            torch.manual_seed(3)
            want = whole.generate(**inputs, **options)
            torch.manual_seed(3)
            assert torch.equal(model.generate(**inputs, **options), want)
    assert not caplog.records


def test_one_recording_serves_prompts_of_any_length(group: WorkerGroup) -> None:
    whole = decoder("Llama")
    with recorded(decoder("Llama"), group) as model:
        for number, inputs in enumerate((padded(7, 5), padded(3, 11), padded(1, 1), padded(9, 9))):
            assert torch.equal(model.generate(**inputs, **HOW), whole.generate(**inputs, **HOW))
            assert count(group) == ((1, REPLAYS) if number == 0 else (0, STEPS - 1))


def test_batches_share_the_recording_of_their_bucket(group: WorkerGroup) -> None:
    whole = decoder("Llama")
    recordings = []
    with recorded(decoder("Llama"), group) as model:
        for lengths in ((7, 5, 2), (3, 8, 6, 4), (5, 5, 5), (9,), (4, 6), (2, 2, 9)):
            inputs = padded(*lengths)
            assert torch.equal(model.generate(**inputs, **HOW), whole.generate(**inputs, **HOW))
            recordings.append(count(group)[0])
    assert recordings == [1, 0, 0, 1, 1, 0]


def test_a_sequence_may_end_within_the_batch(pair: WorkerGroup) -> None:
    whole, inputs = decoder("Llama"), padded(7, 5, 6)
    end = whole.generate(**inputs, **HOW)[1, -8].item()
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    want = whole.generate(**inputs, **options)
    assert (want[:, -1] == 0).any()
    with recorded(decoder("Llama"), pair) as model:
        assert torch.equal(model.generate(**inputs, **options), want)
        assert torch.equal(model.generate(**inputs, **options), want)
        assert count(pair)[0] == 1


def test_a_window_that_fills_is_another_step(group: WorkerGroup) -> None:
    whole, inputs = decoder("Mistral", sliding_window=12), text_inputs()
    options = {**HOW, "max_new_tokens": 20, "min_new_tokens": 20}
    with recorded(decoder("Mistral", sliding_window=12), group) as model:
        want = whole.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options), want)
        assert count(group) == (2, 19 - 2)
        assert torch.equal(model.generate(**inputs, **options), want)
        assert count(group) == (0, 19)


def test_a_longer_call_has_a_longer_cache_made(pair: WorkerGroup) -> None:
    whole, inputs = decoder("Llama"), text_inputs()
    want = whole.generate(**inputs, **HOW)
    recordings = []
    with recorded(decoder("Llama"), pair) as model:
        for longer in ({}, {"max_cache_len": 200}, {}, {"max_cache_len": 256}, {"max_cache_len": 257}):
            assert torch.equal(model.generate(**inputs, **HOW, **longer), want)
            recordings.append(count(pair)[0])
        assert recordings == [1, 1, 0, 0, 1]
        one = {name: tensor[:1] for name, tensor in inputs.items()}
        lengths = []
        for batch in (one, inputs):
            cache = model.generate(**batch, **HOW, return_dict_in_generate=True).past_key_values
            lengths.append(cache.get_max_length())
        assert lengths == [128, 384]


def test_cache_handed_out_belongs_to_the_caller(pair: WorkerGroup) -> None:
    whole, inputs, others = decoder("Llama"), text_inputs(), padded(4, 6)
    with recorded(decoder("Llama"), pair) as model:
        first = model.generate(**inputs, **HOW, return_dict_in_generate=True, output_logits=True)
        assert type(first.past_key_values).__name__ == "StaticCache"
        model.generate(**others, **HOW)
        want = whole.generate(**inputs, **HOW, return_dict_in_generate=True, output_logits=True)
        assert torch.equal(first.sequences, want.sequences)
        for ours, theirs in zip(first.logits, want.logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert first.past_key_values.get_seq_length() == want.past_key_values.get_seq_length() == 7 + STEPS - 1
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, STEPS, dtype=torch.long)], dim=-1)
        position = mask.cumsum(-1)[:, -1:] - 1
        token = {"input_ids": want.sequences[:, -1:], "attention_mask": mask, "position_ids": position}
        ours = model(**token, past_key_values=first.past_key_values).logits
        torch.testing.assert_close(
            ours, whole(**token, past_key_values=want.past_key_values).logits, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"output_attentions": True, "return_dict_in_generate": True}, "the output of a step has attentions"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size is set"),
        ({"use_cache": False}, "use_cache is False"),
        ({"cache_implementation": "dynamic"}, "cache_implementation='dynamic' is set"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unrecordable_options_run_without_graphs(
    pair: WorkerGroup, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole, inputs = decoder("Llama", attention="eager"), text_inputs()
    want = whole.generate(**inputs, **{**HOW, "return_dict_in_generate": True}).sequences
    with recorded(decoder("Llama", attention="eager"), pair) as model, caplog.at_level(logging.WARNING):
        for _ in range(2):
            got = model.generate(**inputs, **HOW, **options)
            assert torch.equal(got if isinstance(got, torch.Tensor) else got.sequences, want)
        assert count(pair) == (0, 0)
    said = [record.message for record in caplog.records if "CUDA" in record.message]
    assert said == [f"generate runs without CUDA graphs: {reason}"]


@pytest.mark.parametrize(
    ("kind", "reason", "recordings"),
    [
        ("item", "aten._local_scalar_dense waits for the device", 0),
        ("mask", "aten.index by a mask waits for the device", 0),
        ("hook", "LlamaMLP has a forward hook", 0),
        ("counts", "a recorded step gives other logits than the step as it is", 1),
    ],
)
def test_uncapturable_models_run_without_graphs(
    pair: WorkerGroup, kind: str, reason: str, recordings: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole, inputs = decoder("Llama"), text_inputs()
    with recorded(decoder("Llama"), pair) as model, caplog.at_level(logging.WARNING):
        pair.call("put_forward", "model.layers.1.mlp", kind)
        got = model.generate(**inputs, **HOW)
        assert kind == "counts" or torch.equal(got, whole.generate(**inputs, **HOW))
        assert count(pair)[0] == recordings
    said = [record.message for record in caplog.records if "CUDA" in record.message]
    assert said == [f"generate runs without CUDA graphs: {reason}"]


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_give_up_together(pair: WorkerGroup, failing: int, caplog: pytest.LogCaptureFixture) -> None:
    whole, inputs = decoder("Llama"), text_inputs()
    want = whole.generate(**inputs, **HOW)
    try:
        with recorded(decoder("Llama"), pair) as model, caplog.at_level(logging.WARNING):
            pair.call("refuse_to_record", failing)
            for _ in range(2):
                assert torch.equal(model.generate(**inputs, **HOW), want)
    finally:
        pair.call("refuse_to_record", -1)
        pair.call("counted")
    said = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    reason = "RuntimeError: CUDA error: operation not permitted when stream is capturing"
    assert said == [f"generate runs without CUDA graphs: {reason}"]


def test_a_changed_configuration_has_steps_recorded_again(pair: WorkerGroup) -> None:
    whole, inputs = decoder("Llama"), text_inputs()
    with recorded(decoder("Llama"), pair) as model:
        assert torch.equal(model.generate(**inputs, **HOW), whole.generate(**inputs, **HOW))
        model.config.attention_dropout = 0.5  # has no effect outside of training
        assert torch.equal(model.generate(**inputs, **HOW), whole.generate(**inputs, **HOW))
        assert count(pair)[0] == 2


def test_a_call_that_fails_midway_leaves_nothing_behind(pair: WorkerGroup) -> None:
    class Raises(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if input_ids.shape[1] >= 12:
                raise ValueError("enough")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    whole, inputs = decoder("Llama"), text_inputs()
    with recorded(decoder("Llama"), pair) as model:
        with pytest.raises(ValueError, match="enough"):
            model.generate(**inputs, **HOW, stopping_criteria=StoppingCriteriaList([Raises()]))
        assert torch.equal(model.generate(**inputs, **HOW), whole.generate(**inputs, **HOW))
        assert count(pair)[0] == 1
        logits = model(**inputs).logits
        torch.testing.assert_close(logits, whole(**inputs).logits, rtol=1e-4, atol=1e-4)


def test_memory_that_moved_has_steps_recorded_again(pair: WorkerGroup) -> None:
    whole, inputs = decoder("Llama"), text_inputs()
    with recorded(decoder("Llama"), pair) as model:
        model.generate(**inputs, **HOW)
        pair.call("lose_memory")
        assert torch.equal(model.generate(**inputs, **HOW), whole.generate(**inputs, **HOW))
        assert count(pair)[0] == 2


def test_recordings_are_dropped_with_their_model(pair: WorkerGroup) -> None:
    for make in (FAMILIES["llama"], FAMILIES["qwen3"]):
        whole, inputs = make(), text_inputs()
        with recorded(make(), pair) as model:
            assert torch.equal(model.generate(**inputs, **HOW), whole.generate(**inputs, **HOW))
            assert count(pair)[0] == 1


LENGTHS = ((3, 30), (12, 25), (5, 40), (3, 12), (9, 33), (20, 6), (1, 28))


def calls() -> list[dict[str, Any]]:
    """Return prompts of many lengths, so that some join after others have left."""
    return [
        {"input_ids": token_ids(1, before, seed=number), "max_new_tokens": after, "do_sample": False}
        for number, (before, after) in enumerate(LENGTHS)
    ]


def together(model: Any) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        return list(pool.map(lambda call: model.generate(**call), calls()))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_rows_that_are_decoded_together_share_recordings(
    group: WorkerGroup, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    want = [FAMILIES[family]().generate(**call) for call in calls()]
    count(group)
    batching = {"rows": 4}
    with (
        caplog.at_level(logging.WARNING, "parallelformers_ng"),
        parallelize(FAMILIES[family](), workers=group, decode="cuda_graphs", batching=batching) as model,
    ):
        assert all(map(torch.equal, together(model), want))
        recordings, replays = count(group)
        assert 1 <= recordings <= 3  # recordings of 1, 2 and 4 rows
        assert replays >= 30  # of at least 39 steps; per kind, the first runs unrecorded and the second is recorded
        assert all(map(torch.equal, together(model), want))
        assert count(group)[0] <= 3 - recordings
    assert not [record for record in caplog.records if record.name.startswith("parallelformers_ng")]


def test_rows_outgrow_a_recorded_cache(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {"input_ids": token_ids(1, 100, seed=5), "max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False}
    want = decoder("Llama").generate(**specs)
    count(group)
    with parallelize(decoder("Llama"), workers=group, decode="cuda_graphs", batching=True) as model:
        assert torch.equal(model.generate(**specs), want)
    assert count(group)[0] == 2


def test_rows_without_static_cache_run_unrecorded(group: WorkerGroup, caplog: pytest.LogCaptureFixture) -> None:
    def with_states() -> Any:
        return decoder("Lfm2", layer_types=["conv", "full_attention"], block_ff_dim=74)

    want = [with_states().generate(**call) for call in calls()]
    with (
        caplog.at_level(logging.WARNING, "parallelformers_ng"),
        parallelize(with_states(), workers=group, decode="cuda_graphs", batching=True) as model,
    ):
        assert all(map(torch.equal, together(model), want))
    own = [each.message.partition(":")[0] for each in caplog.records if each.name.startswith("parallelformers_ng")]
    assert own == ["calls that are decoded together run without CUDA graphs"]


@pytest.mark.parametrize("row", [1, len(LENGTHS)], ids=["alone", "together"])
@pytest.mark.parametrize(("fault", "failing"), [("lack_room", 0), ("lack_room", 1), ("refuse_to_record", 1)])
def test_rows_continue_without_room_for_recordings(
    pair: WorkerGroup, fault: str, failing: int, row: int, caplog: pytest.LogCaptureFixture
) -> None:
    specs = calls()[-row:]
    want = [decoder("Llama").generate(**call) for call in specs]
    count(pair)
    batching = {"rows": 4}
    with (
        caplog.at_level(logging.INFO, "parallelformers_ng"),
        parallelize(decoder("Llama"), workers=pair, decode="cuda_graphs", batching=batching) as model,
    ):
        try:
            pair.call(fault, failing)
            with ThreadPoolExecutor(row) as pool:
                got = list(pool.map(lambda call: model.generate(**call), specs))
        finally:
            pair.call(fault, -1)
        assert all(map(torch.equal, got, want))
        pair.call("counted")  # counts differ: a recording failed on one rank
        assert torch.equal(model.generate(**specs[0]), want[0])
        assert count(pair) == (0, 0)
    said = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert len(said) == 1
    assert said[0].startswith("calls that are decoded together run without CUDA graphs: ")


def test_recording_serves_its_own_adapters_only(pair: WorkerGroup) -> None:
    import peft

    configs = [peft.LoraConfig(r=8, lora_alpha=64, target_modules=["k_proj", "v_proj"]) for _ in range(2)]
    model, alone = (peft.get_peft_model(decoder("Llama"), configs[0]) for _ in range(2))
    want = []
    for each in (model, alone):
        each.add_adapter("other", configs[1])
        randomise(each, seed=3).eval()
    for name in ("default", "other"):
        alone.set_adapter(name)
        want.append(alone.generate(**text_inputs(), **HOW))
    assert not torch.equal(*want)
    count(pair)
    with parallelize(model, workers=pair, decode="cuda_graphs") as model:
        for name, tokens in zip(("default", "other"), want, strict=True):
            model.set_adapter(name)
            for _ in range(2):
                assert torch.equal(model.generate(**text_inputs(), **HOW), tokens)
            recordings, replays = count(pair)
            assert recordings == 1
            assert replays >= REPLAYS
