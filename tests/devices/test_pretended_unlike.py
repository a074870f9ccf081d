"""Tests ranks on pretended CUDA devices of different kinds: see `tests/pretend_cuda`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.runtime.group import WorkerGroup
from tests.pretend_cuda.caller import TARGET, believe, small
from tests.pretend_cuda.tensor import MULTIPROCESSORS
from tests.zoo.case import token_ids

ROWS = 4  # of 131 tokens: three blocks of threads; one of the devices runs one block at once

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "eager steps": {"do_sample": True, "cache_implementation": "dynamic"},
}


@pytest.fixture(scope="module")
def unlike() -> Iterator[WorkerGroup]:
    with pytest.MonkeyPatch.context() as patch:
        believe(patch)
        patch.setenv(MULTIPROCESSORS, "132,1")
        with WorkerGroup(2, "cuda", target=TARGET, timeout=60) as group:
            yield group


@pytest.mark.parametrize("way", WAYS)
def test_ranks_continue_with_tokens_of_rank_zero(
    way: str, unlike: WorkerGroup, pretended_one: WorkerGroup, pretended: WorkerGroup
) -> None:
    """The tokens of the unlike devices equal the tokens of one device alone, and of two equal devices."""
    ids, options = token_ids(rows=ROWS), {"max_new_tokens": 6, "min_new_tokens": 6, "seed": 5, **WAYS[way]}
    if not options["do_sample"]:
        del options["seed"]
    answers = []
    for group in (pretended_one, pretended, unlike):
        with parallelize(small(), workers=group) as model:
            answers += [model.generate(ids, **options), model.generate(ids, **options)]
    assert all(torch.equal(answer, answers[0]) for answer in answers)


class OfTheRank(LlamaForCausalLM):
    """An assistant that proposes wrong tokens on rank 1."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits[..., 5] += 100 * output.logits.device.index
        return output


def test_all_ranks_check_proposals_of_rank_zero(unlike: WorkerGroup) -> None:
    ids, options = token_ids(rows=1), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assistant: Any = small()
    assistant.__class__ = OfTheRank
    assistant.generation_config.assistant_confidence_threshold = 0.0
    want = small().generate(ids, **options)
    with parallelize(small(), workers=unlike) as model:
        assert torch.equal(model.generate(ids, assistant_model=assistant, **options), want)


def test_dropout_is_refused(unlike: WorkerGroup) -> None:
    """With dropout each rank would draw different random numbers, and nobody would notice."""
    with parallelize(small(), workers=unlike) as model:
        model.train()
        with pytest.raises(
            ParallelError, match=r"training mode, and its devices are of different kinds.*model.eval\(\)"
        ):
            model(token_ids())
        model.eval()
        assert model(token_ids()).logits.isfinite().all()
