"""Tests layouts of ranks that share one card: pipelines, replicas, and the ranks of a torchrun job."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.model.parallelized import deployment_of
from tests.devices.one_card.expected import greedy, without_ties
from tests.devices.one_card.place import Place, slow
from tests.helpers.patience import await_end
from tests.zoo.decoders import decoder, gpt2

ROOT = Path(__file__).parents[3]
TOKENS = 12


def _llama() -> Any:
    return decoder("Llama", layers=4)


@slow
@pytest.mark.parametrize("make", [_llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    ("ranks", "fit"),
    [(2, {"strategy": "pipeline"}), (4, {"strategy": "tensor+pipeline", "tensor": 2})],
    ids=["pipeline", "tensor+pipeline"],
)
def test_stages_equal_the_plain_model(ranks: int, fit: dict[str, Any], make: Any, place: Place) -> None:
    inputs, want = without_ties(make(), TOKENS)
    with parallelize(make(), workers=place.group(ranks), fit=fit) as model:
        for _ in range(3):
            assert torch.equal(greedy(model, inputs, TOKENS), want)


@slow
def test_two_replicas_of_two_ranks(place: Place) -> None:
    inputs, want = without_ties(_llama(), TOKENS)
    model = parallelize(_llama(), 2, workers={**place.workers(4), "replicas": 2})
    pids = deployment_of(model).pids
    assert len(set(pids)) == 4
    with model, ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            for got in pool.map(lambda _: greedy(model, inputs, TOKENS), range(4)):
                assert torch.equal(got, want)
    await_end(*pids)


@slow
def test_torchrun_of_two_processes(tmp_path: Path, place: Place) -> None:
    """Each rank is on the first device, because the script of the job says so: see `torchrun_script.py`."""
    _llama().save_pretrained(tmp_path)
    kind = "card" if place.is_real else "pretended"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    script = ["tests.devices.one_card.torchrun_script", kind, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, *command, *script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens equal: True" in done.stdout
    await_end(*map(int, done.stdout.partition("pids: ")[2].split()))
