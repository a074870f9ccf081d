"""Tests calls that are decoded together on pretended CUDA devices: see `tests/pretend_cuda`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.model.remote_module import remote_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers.rounds_seen import use_short_pieces
from tests.pretend_cuda.caller import small
from tests.pretend_cuda.objects import Favours
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2

LENGTHS = ((3, 9), (12, 5), (5, 12), (3, 4), (9, 7))


def calls(**more: Any) -> list[dict[str, Any]]:
    ids = text_inputs()["input_ids"].flatten().repeat(2)
    return [
        {"input_ids": ids[None, number : number + before], "max_new_tokens": after, "do_sample": False, **more}
        for number, (before, after) in enumerate(LENGTHS)
    ]


def together(model: Any, specs: list[dict[str, Any]]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(specs)) as pool:
        return list(pool.map(lambda call: model.generate(**call), specs))


def test_shared_calls_get_solo_tokens(monkeypatch: pytest.MonkeyPatch, pretended: WorkerGroup) -> None:
    use_short_pieces(monkeypatch, 4)
    for make in (small, gpt2):
        want = [make().generate(**call) for call in calls()]
        with parallelize(make(), workers=pretended, batching={"rows": 3}) as model:
            got = together(model, calls())
            assert not remote_of(model).calls.shared[0].trial.why_alone(type(model), model.config)
            assert all(map(torch.equal, got, want))


def test_sampled_calls_draw_from_own_streams(pretended: WorkerGroup) -> None:
    specs = [{**call, "do_sample": True, "seed": number} for number, call in enumerate(calls())]
    with parallelize(small(), workers=pretended, batching=False) as model:
        want = [model.generate(**call) for call in specs]
    with parallelize(small(), workers=pretended, batching=True) as model:
        assert all(map(torch.equal, together(model, specs), want))


def test_processors_that_hold_tensors(pretended_one: WorkerGroup) -> None:
    bias = torch.randn(131, generator=torch.Generator().manual_seed(5)) * 3
    whole, mine, theirs = small(), [Favours(bias) for _ in LENGTHS], [Favours(bias) for _ in LENGTHS]
    want = [whole.generate(**call, logits_processor=[each]) for each, call in zip(mine, calls(), strict=True)]
    with parallelize(small(), workers=pretended_one, batching=True) as model:
        specs = [{**call, "logits_processor": [each]} for each, call in zip(theirs, calls(), strict=True)]
        assert all(map(torch.equal, together(model, specs), want))
    assert [len(each.sums) for each in theirs] == [len(each.sums) for each in mine]
    assert {each.total.device.type for each in theirs} == {"cpu"}
