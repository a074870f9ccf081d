"""Tests that the first answer after a restart waits for no recordings and trials, on pretended devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers.patience import await_incarnation, kill
from tests.pretend_cuda.caller import small
from tests.zoo.case import token_ids

HOW: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


@pytest.mark.parametrize("options", [{}, {"batching": True}, {"decode": "cuda_graphs"}], ids=str)
def test_first_answer_waits_for_no_recordings(options: dict[str, Any], pretended: WorkerGroup) -> None:
    """The later calls record a step and use it. The pretended fixture has made the process see devices."""
    ids = token_ids(rows=1)
    want = small().generate(ids, **HOW)
    workers = {"device": "cuda", "host_copy": True}
    with parallelize(small(), 2, workers=workers, **options) as model:

        def made() -> tuple[int, bool]:
            """Return the number of recordings since the last call, and whether kernels were tried in this group."""
            group = deployment_of(model).replicas[0].group
            return group.call("graphs")[0], group.call("has_trial")

        assert torch.equal(model.generate(ids, **HOW), want)
        assert made() == (1, True)
        for incarnation in (1, 2):
            kill(deployment_of(model).pids[1])
            await_incarnation(model, incarnation)
            assert torch.equal(model.generate(ids, **HOW), want)
            assert made() == (0, False)
            assert torch.equal(model.generate(ids, **HOW), want)
            assert made() == (1, True)
