"""Tests that the stand-in for CUDA devices reports faults that a real device hides: see `tests/pretend_cuda`."""

from __future__ import annotations

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from tests.pretend_cuda.caller import small
from tests.pretend_cuda.ledger import PAGEABLE, TO_DEVICE
from tests.zoo.case import token_ids

MISUSES = {
    "use": "was written on another stream",
    "overwrite": "is read on another stream",
    "let go": "no record_stream",
    "read early": "the copy has not arrived",
    "refill early": "from which a copy may not have left",
    "free": "needs 1 tensors whose memory was freed",
    "other graph": "another graph has overwritten it",
    "pool": "use_count > 0",
    "wait": "previous error during capture",
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_found(name: str, pretended_one: WorkerGroup) -> None:
    assert pretended_one.call("misuse", name, right=True) == ""
    assert MISUSES[name] in pretended_one.call("misuse", name, right=False)


def test_memory_counts(pretended_one: WorkerGroup) -> None:
    with parallelize(small(), workers=pretended_one) as model:
        before = pretended_one.call("reserved")
        assert before >= pretended_one.call("allocated") > 0
        pretended_one.call("limit", 1000)
        try:
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
                model(token_ids(rows=64, length=64), use_cache=False)
        finally:
            pretended_one.call("limit", None)
        assert model(token_ids(rows=64, length=64), use_cache=False).logits.isfinite().all()
        pretended_one.call("graphs")
        assert pretended_one.call("reserved", collect=True) < 2 * before


def test_weights_come_from_page_locked_memory(pretended_one: WorkerGroup, tmp_path: object) -> None:
    """Both a model in memory and one in files use page-locked memory."""
    model = small()
    model.save_pretrained(tmp_path)
    for source in (model, str(tmp_path)):
        pretended_one.call("counted")
        with parallelize(source, 1, workers=pretended_one):
            counts = pretended_one.call("counted")
        assert sum(counts[TO_DEVICE].values()) > 0
        assert not [place for place in counts[PAGEABLE] if place.startswith("worker/")]
