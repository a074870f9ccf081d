"""What goes wrong on pretended CUDA devices: see `tests/pretend_cuda`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import LogitsProcessor

from parallelformers_ng import parallelize
from parallelformers_ng.errors import PlacementError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.zoo.case import VOCABULARY, text_inputs, token_ids
from tests.zoo.decoders import decoder, gpt2

GREEDY = {"max_new_tokens": 4, "do_sample": False}


def test_a_token_id_out_of_range_costs_its_request_alone(pretended: WorkerGroup) -> None:
    whole = decoder("Llama").generate(**text_inputs(), **GREEDY)
    with parallelize(decoder("Llama"), workers=pretended) as model:
        for bad, call in ((VOCABULARY, model), (-1, model), (1 << 40, partial(model.generate, max_new_tokens=2))):
            ids = token_ids()
            ids[1, 3] = bad
            with pytest.raises(IndexError, match=f"id {bad}, vocabulary of {VOCABULARY}$"):
                call(input_ids=ids)
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole)


def test_a_position_out_of_range_costs_its_request_alone(pretended: WorkerGroup) -> None:
    """Of a table that every rank holds whole, and looks up without an exchange."""
    with parallelize(gpt2(), workers=pretended) as model:
        with pytest.raises(IndexError, match=r"id 64, vocabulary of 64$"):
            model(input_ids=token_ids(length=65))
        assert model(input_ids=token_ids(length=64)).logits.isfinite().all()


class LooksBeyond(LogitsProcessor):
    """Fails on the device, as code of the caller's may."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.gather(1, input_ids[:, -1:] + 1000)


def test_a_device_that_failed_is_left_by_its_workers(pretended: WorkerGroup) -> None:
    whole = decoder("Llama").generate(**text_inputs(), **GREEDY)
    with parallelize(decoder("Llama"), 2, workers={"device": "cuda", "host_copy": True}) as model:
        before = deployment_of(model).pids
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            model.generate(**text_inputs(), logits_processor=[LooksBeyond()], **GREEDY)
        assert torch.equal(model.generate(**text_inputs(), **GREEDY), whole)
        assert not set(before) & set(deployment_of(model).pids)


def test_nccl_is_given_no_device_twice(pretended: WorkerGroup) -> None:
    with pytest.raises(PlacementError, match=r"device_ids \[0, 0\] name a device twice"):
        parallelize(decoder("Llama"), workers={"device": "cuda", "device_ids": [0, 0]})


def test_ranks_that_share_a_device(pretended: WorkerGroup) -> None:
    how = {"device": "cuda", "device_ids": [1, 1], "backend": "shared_memory"}
    with parallelize(decoder("Llama"), workers=how) as model:
        assert torch.equal(
            model.generate(**text_inputs(), **GREEDY), decoder("Llama").generate(**text_inputs(), **GREEDY)
        )
        assert set(model.memory_allocated()) == {"cuda:1"}
