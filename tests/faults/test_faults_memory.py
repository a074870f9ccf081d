"""Tests workers that run out of memory: a failed allocation fails its request, or the kernel kills the worker."""

from __future__ import annotations

import resource
import time

import psutil
import pytest
import torch

from benchmarks.control_groups import memory_limit
from parallelformers_ng import parallelize
from parallelformers_ng.errors import WorkerDiedError, WorkerError
from parallelformers_ng.model.parallelized import deployment_of
from tests.helpers.patience import PROMPTLY
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2

MANY = torch.ones(1024, 60, dtype=torch.long)  # half a megabyte of ids, hundreds of megabytes of activations


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_failed_allocation_leaves_the_group_working(groups, ranks):
    model, group = gpt2(), groups(2)
    with torch.no_grad():
        want = model(**text_inputs()).logits
    parallelize(model, workers=group)
    for rank in ranks:
        size = psutil.Process(group.pids[rank]).memory_info().vms + (4 << 20)
        resource.prlimit(group.pids[rank], resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    with pytest.raises((RuntimeError, MemoryError), match=r"memory|alloc") as caught:
        model(input_ids=MANY)
    assert isinstance(caught.value, WorkerError)
    assert caught.value.rank in ranks
    for rank in ranks:
        resource.prlimit(group.pids[rank], resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert torch.allclose(model(**text_inputs()).logits, want, atol=1e-5)
    model.deparallelize()


def test_memory_killer_is_named_and_group_recovers():
    model = gpt2()
    with torch.no_grad():
        want = model(**text_inputs()).logits
    parallelize(model, 2, workers={"device": "cpu", "timeout": 120})
    pid = deployment_of(model).pids[1]
    with memory_limit(pid, 48 << 20) as limited:
        if not limited:
            model.deparallelize()
            pytest.skip("this user may not make control groups of memory")
        begin = time.monotonic()
        with pytest.raises(WorkerDiedError, match="memory killer") as caught:
            model(input_ids=MANY)
        assert time.monotonic() - begin < PROMPTLY
        assert (caught.value.rank, caught.value.signal) == (1, 9)
        while psutil.pid_exists(pid):
            time.sleep(0.01)
    assert torch.allclose(model(**text_inputs()).logits, want, atol=1e-5)
    model.deparallelize()
