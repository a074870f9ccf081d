"""Tests ranks on the nodes of a torchrun job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from parallelformers_ng import parallelize, start_group
from parallelformers_ng.errors import ParallelError, PlacementError, StartupError
from parallelformers_ng.hosts import torchrun
from parallelformers_ng.model.parallelized import deployment_of
from tests.helpers.patience import await_end, await_incarnation, kill
from tests.helpers.saved_model import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys, torch
from transformers import AutoModelForCausalLM
from parallelformers_ng import parallelize
from parallelformers_ng.model.parallelized import deployment_of

ids = torch.arange(1, 8)[None]
for _ in range(2):
    model = parallelize(sys.argv[1], progress=False)
    logits, tokens = model(ids).logits, model.generate(ids, max_new_tokens=5)
    print("of", model.shard_plan.world_size, "ranks", *deployment_of(model).pids, flush=True)
    model.deparallelize()
whole = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
assert torch.allclose(logits, whole(ids).logits, atol=1e-4)
assert torch.equal(tokens, whole.generate(ids, max_new_tokens=5))
print("equal on", model.config.model_type, "as the caller", os.environ["RANK"])
"""


def job(monkeypatch, rank=0, nodes=1, each=2, group=0):
    """Set the environment of a process that torchrun has started."""
    values = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": rank,
        "LOCAL_RANK": rank % each,
        "GROUP_RANK": group,
        "GROUP_WORLD_SIZE": nodes,
        "LOCAL_WORLD_SIZE": each,
        "WORLD_SIZE": nodes * each,
    }
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    torchrun._open.cache_clear()


def test_one_node_takes_and_restarts_its_ranks(monkeypatch, tmp_path):
    job(monkeypatch)
    path = save_tiny_model(tmp_path)
    ids = torch.arange(1, 8)[None]
    due = AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits
    with parallelize(path, progress=False) as model:
        assert model.shard_plan.world_size == 2
        assert torch.allclose(model(ids).logits, due, atol=1e-4)
        pid = deployment_of(model).pids[0]
        kill(pid)
        await_incarnation(model, 1)
        assert torch.allclose(model(ids).logits, due, atol=1e-4)
        running = deployment_of(model).pids
    await_end(pid, *running)


def test_other_processes_end_at_the_call(monkeypatch):
    job(monkeypatch, rank=1)
    with pytest.raises(SystemExit) as raised:
        start_group()
    assert not raised.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_gpus": 3}, r"num_gpus is 3, but torchrun has started 2 processes"),
        ({"device": "cuda", "device_ids": [1, 0]}, r"device_ids \[1, 0\] name devices of this machine"),
        ({"launcher": "slurm"}, r"launcher is 'slurm'; it takes one of 'auto', 'local', 'torchrun'"),
    ],
)
def test_unsupported_options_in_a_job_are_refused(monkeypatch, arguments, message):
    job(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ParallelError, match=message):
        start_group(**arguments)


def test_each_process_of_a_job_has_one_device(monkeypatch, tmp_path):
    job(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PlacementError, match="replicas is 2, but each process of a torchrun job has only one device"):
        parallelize(save_tiny_model(tmp_path), workers={"replicas": 2})


def test_missing_job_is_reported():
    with pytest.raises(PlacementError, match="torchrun has not started this process"):
        start_group(2, launcher="torchrun")


def test_nodes_without_a_key_are_refused(monkeypatch):
    job(monkeypatch, nodes=2)
    for text in ("", "too short"):
        monkeypatch.setenv(torchrun.KEY, text)
        message = f"{torchrun.KEY} has {len(text)} characters; set it to the same secret text of at least 32"
        with pytest.raises(StartupError, match=message):
            start_group(device="cpu")


def test_address_of_every_interface_is_refused(monkeypatch):
    job(monkeypatch, nodes=2)
    monkeypatch.setenv(torchrun.KEY, "k" * 32)
    monkeypatch.setenv(torchrun.INTERFACE, "0.0.0.0")
    with pytest.raises(
        StartupError, match=r"0.0.0.0 is not an address .*every interface.*; set PARALLELFORMERS_NG_ADDRESS"
    ):
        start_group(device="cpu")


def test_own_workers_are_possible_within_a_job(monkeypatch):
    job(monkeypatch)
    with start_group(1, device="cpu", launcher="local") as group:
        assert group.hosts is None


@pytest.mark.slow
def test_two_nodes_of_two_processes_run_one_script(tmp_path):
    """Two jobs of torchrun on this machine act as two nodes: four ranks, and no process remains."""
    path, script = save_tiny_model(tmp_path / "model"), tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", torchrun.KEY: "k" * 32}
    options = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", f"--node-rank={node}", *options, script, path],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    said = [job.communicate(timeout=280)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)
    assert "equal on llama as the caller 0" in said[0]
    assert "equal" not in said[1]
    ranks = [line.split() for line in said[0].splitlines() if line.startswith("of ")]
    assert [len(words) for words in ranks] == [7, 7]
    await_end(*(int(pid) for words in ranks for pid in words[3:]))
