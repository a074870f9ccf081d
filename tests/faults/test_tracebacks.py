"""Tests what a timeout says: for each rank the file and line at which it stood."""

from __future__ import annotations

import os
import re
import signal
import socket
import time

import pytest
import torch

from parallelformers_ng import deadline, parallelize
from parallelformers_ng.errors import RequestTimeoutError
from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers import hanging, runtime_target
from tests.helpers.hanging import endless, hook, place_of_sleep
from tests.helpers.saved_model import save_tiny_model
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2


def blocks(error: RequestTimeoutError) -> list[str]:
    """Return the text about each rank."""
    parts = re.split(r"^(?:parallelformers-ng: .*\n)?rank \d ", str(error), flags=re.MULTILINE)
    assert "ran past its deadline" in parts[0]
    assert max(part.count("\n") for part in parts) <= 13
    return parts[1:]


def test_request_is_described():
    group = WorkerGroup(2, target="tests.helpers.runtime_target:Target", threads=1)
    with group, pytest.raises(RequestTimeoutError) as caught:
        group.call("sleep", 60, ranks=[1], deadline=time.monotonic() + 0.5)
    assert "The request was answered by ranks [0]: sleep(60, ranks=list)\n" in str(caught.value)
    answered, sleeps = blocks(caught.value)
    assert "waits for a request" in answered
    assert "runs 'sleep'" in sleeps
    assert re.search(r"runtime_target\.py, line \d+, in sleep\n", sleeps)


def test_request_that_nobody_reads_is_described():
    with WorkerGroup(1, target="tests.helpers.runtime_target:Target", threads=1) as group:
        group._processes.workers[0].channel.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        os.kill(group.pids[0], signal.SIGSTOP)
        with pytest.raises(RequestTimeoutError) as caught:
            group.call("echo", "x" * 60_000, deadline=time.monotonic() + 0.5)
    assert "The request was being sent to rank 0: echo('xxxxxxxxxxxx...xxxxxxxxxxxxx')\n" in str(caught.value)
    assert "T (stopped)" in blocks(caught.value)[0]


def test_hook_that_hangs_on_one_rank_is_named():
    model = gpt2()
    model.transformer.h[1].register_forward_pre_hook(hook)
    parallelize(model, 2, workers={"device": "cpu", "restart": False})
    with pytest.raises(RequestTimeoutError) as caught, deadline(6):
        model(**text_inputs())
    request = "run(__call__(input_ids=int64[2, 7], attention_mask=int64[2, 7]))"
    assert f"The request was running on the ranks: {request}\n" in str(caught.value)
    waits, hangs = blocks(caught.value)
    assert place_of_sleep("hook") in hangs
    assert "collectives/" in waits
    assert hanging.__file__ not in waits


def test_processor_that_hangs_is_named_on_every_rank():
    model = parallelize(gpt2(), 2, workers={"device": "cpu", "restart": False})
    model.generate(**text_inputs(), max_new_tokens=4)  # a first call takes longer
    with pytest.raises(RequestTimeoutError) as caught, deadline(4):
        model.generate(**text_inputs(), max_new_tokens=4, logits_processor=[endless])
    for block in blocks(caught.value):
        assert place_of_sleep("endless") in block


@pytest.mark.parametrize("seconds", [3, None])
def test_processor_that_hangs_in_a_batch(seconds):
    """A call with a short deadline leaves the batch. Without one, the group ends with the call."""
    model = parallelize(gpt2(), 2, workers={"device": "cpu", "restart": False, "timeout": 5}, batching=True)
    prompt = torch.tensor([[5, 6, 7]])
    model.generate(prompt, max_new_tokens=4)  # a first call takes longer
    with pytest.raises(RequestTimeoutError) as caught:
        model.generate(prompt, max_new_tokens=4, logits_processor=[endless], timeout=seconds)
    run = [block for block in blocks(caught.value) if "runs 'decode_rows'" in block]  # other groups of the process wait
    hangs, waits = sorted(run, key=lambda block: place_of_sleep("endless") not in block)
    assert place_of_sleep("endless") in hangs
    assert "collectives/" in waits
    if seconds is not None:
        assert "in its prompt of 3 tokens; its round began " in str(caught.value)


def test_rank_that_hangs_in_a_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("parallelformers_ng.model.groups.RUNNER", "tests.helpers.hanging_reader:HangingReader")
    options = {"device": "cpu", "timeout": 5, "restart": False}
    with pytest.raises(RequestTimeoutError) as caught:
        parallelize(save_tiny_model(tmp_path), 2, workers=options)
    done, reads = blocks(caught.value)
    assert "answered by ranks [0]: load(list)" in str(caught.value)
    assert "waits for a request" in done
    assert "runs 'load'" in reads
    assert re.search(r"hanging_reader\.py, line \d+, in _never_ending\n", reads)
    assert re.search(r"checkpoint/reading\.py, line \d+, in read_shard\n", reads)


@pytest.mark.parametrize("stops", [False, True])
def test_ranks_in_a_collective_are_named(stops, capfd):
    with WorkerGroup(2, target="tests.helpers.runtime_target:Target", threads=1) as group:
        group.call("meet")
        if stops:
            os.kill(group.pids[1], signal.SIGSTOP)
            method, arguments = "sum_of_ranks", (1.0,)
        else:
            method, arguments = "late_to_meet", (1,)
        with pytest.raises(RequestTimeoutError, match=f"'{method}'") as caught:
            group.call(method, *arguments, deadline=time.monotonic() + 1)
    waits, late = blocks(caught.value)
    assert f"2 steps of collectives, the last all_reduce of {8 if stops else 1} numbers, runs {method!r}" in waits
    assert "1 steps of collectives, the last all_reduce of 1 numbers" in late
    assert f"{runtime_target.__file__}, line" in waits
    assert "collectives/shared_memory.py, line" in waits.partition("\n")[2].partition("\n")[0]
    if stops:
        assert "T (stopped)" in late
        assert "runtime/service.py, line" in late
    else:
        assert re.search(r"runtime_target\.py, line \d+, in late_to_meet", late)
    assert not capfd.readouterr().err
