"""Tests that ranks agree on the tokens of ids that have a dimension of codebooks."""

from __future__ import annotations

import pytest
import torch
from transformers import MaxLengthCriteria, StoppingCriteriaList

from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import DivergedError
from parallelformers_ng.generation.lockstep import AgreedCriteria

IDS = torch.arange(24).view(2, 3, 4)  # two rows of three tokens, each with four codebooks


@pytest.mark.parametrize("sends", [False, True])
def test_tokens_of_all_codebooks_count(sends: bool) -> None:
    def agree(communicator, changed: int) -> list[bool]:
        criteria = StoppingCriteriaList([MaxLengthCriteria(3)])
        ids = IDS.clone()
        ids[1, -1, 2] += changed * communicator.rank
        agreed = AgreedCriteria(criteria, communicator, 1, sends)
        ended = agreed(ids, None).tolist()
        agreed.check()
        assert torch.equal(ids, IDS)
        return ended

    assert run_ranks(2, lambda communicator: agree(communicator, 0)) == [[True, True]] * 2
    if sends:  # all ranks continue with the tokens of rank 0
        run_ranks(2, lambda communicator: agree(communicator, 5))
    else:
        with pytest.raises(DivergedError):
            run_ranks(2, lambda communicator: agree(communicator, 5))
