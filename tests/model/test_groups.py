"""Tests groups that serve one model after another, and errors before a group starts."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings

import pytest
import torch

from parallelformers_ng import __version__, parallelize, start_group
from parallelformers_ng.errors import PlacementError, StartupError
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.worker_process import WorkerProcess
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2


@pytest.mark.parametrize("kept", [pytest.param("nothing", marks=pytest.mark.slow), "a cache", "a cycle"])
def test_group_of_a_dropped_model_serves_another(groups, kept):
    group = groups(2)
    with torch.no_grad():
        want = gpt2()(**text_inputs()).logits
    model = parallelize(gpt2(), workers=group)
    assert group.in_use
    cache = model(**text_inputs(), use_cache=True).past_key_values if kept == "a cache" else None
    if kept == "a cycle":
        model.itself = [model]
    del model
    other = parallelize(gpt2(), workers=group)
    assert torch.allclose(other(**text_inputs()).logits, want, atol=1e-5)
    assert group.in_use
    other.deparallelize()
    assert not group.in_use
    del cache


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "cpu", "backend": "nccl"}, "'nccl' does not serve cpu"),
        ({"device": "cuda", "backend": "gloo", "device_ids": [0, 1]}, "'gloo' does not serve cuda"),
        ({"device": "cuda", "backend": "nccl", "device_ids": [0, 0]}, "NCCL"),
        ({"device": "cpu", "backend": "mpi"}, "it takes one of"),
    ],
)
def test_impossible_backend_is_refused_before_a_start(options, text, monkeypatch):
    started = []
    monkeypatch.setattr(WorkerProcess, "__init__", lambda *args: started.append(args))
    with pytest.raises(PlacementError, match=text):
        WorkerGroup(2, target="tests.helpers.runtime_target:Target", **options)
    if options["device"] == "cpu":
        with pytest.raises(PlacementError, match=text):
            start_group(2, **options)
    assert not started


def test_slow_start_names_the_place_reached():
    WorkerGroup(1, target="tests.helpers.runtime_target:Target", threads=1).close()  # imports once
    with pytest.raises(StartupError) as caught:
        WorkerGroup(2, target="tests.helpers.runtime_target:NeverReady", threads=1, start_timeout=3)
    text = str(caught.value)
    # On a slow machine the worker is still importing.
    place = r"(building NeverReady \(\S+runtime_target\.py|importing \S+ \(\S+\.py), line \d+\)"
    assert re.search(
        rf"rank \d was not ready within 3 s; it was {place}\. Allow more time with start_timeout=", text
    ), text


def test_warnings_of_all_ranks_are_printed_once(capfd):
    def warn_twice(input_ids, scores):
        logging.getLogger("somebody").warning("logged: %s", "take care")
        warnings.warn("warned: take care", stacklevel=1)
        return scores

    def fail(input_ids, scores):
        raise LookupError("no way")

    # Not a shared group: a worker keeps the standard error of its start.
    model = parallelize(gpt2(), 2, workers={"device": "cpu"})
    options = {**text_inputs(), "do_sample": False}
    model.generate(**options, max_new_tokens=1, logits_processor=[warn_twice])
    model.generate(**options, max_new_tokens=2, max_length=9)
    with pytest.raises(LookupError) as caught:
        model.generate(**options, max_new_tokens=1, logits_processor=[fail])
    assert caught.value.remote_traceback.count("LookupError: no way") == 1
    model.deparallelize()
    printed, logged = capfd.readouterr()
    assert logged.count("logged: take care") == 1
    assert logged.count("UserWarning: warned: take care") == 1
    assert logged.count("Both `max_new_tokens`") == 1
    assert printed == ""


@pytest.mark.parametrize("module", ["parallelformers_ng", "parallelformers_ng.cli.commands"])
def test_the_version_on_the_command_line(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"parallelformers-ng {__version__}\n", done.stderr
