"""Tests `benchmarks/gpu_policies.py`: its table has each policy, and each run goes on after the one before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_policies
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.sharding.policy_registry import written_policies
from tests.pretend_cuda.caller import believe
from tests.zoo.of_policies import CASES, TWINS


def test_each_written_policy_has_one_model() -> None:
    named = [policy for policies in (*CASES.values(), *TWINS.values()) for policy in policies.split()]
    assert len(set(named)) == len(named)
    assert set(named) == {policy.__name__.removesuffix("Policy") for policy in written_policies()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(CASES))
def test_model_has_the_policies_of_the_table(name: str) -> None:
    policies = {policy.__name__ for policy in select(gpu_policies.tiny(name).model, world_size=2).policies}
    assert {f"{policy}Policy" for policy in CASES[name].split()} <= policies


def test_a_run_goes_on_after_the_last_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ranks are on a pretended device. Of three policies, one is equal from an earlier run."""
    believe(monkeypatch)
    monkeypatch.setattr(gpu_policies, "models", lambda: {"llama": ["Llama"], "gpt2": ["GPT2"], "bert": ["Bert"]})
    results = tmp_path / "gpu.json"
    results.write_text(json.dumps({gpu_policies.HEADING: {"Llama": gpu_policies.EQUAL, "Bert": "other tokens"}}))
    ran: list[str] = []
    problem = gpu_policies.problem
    monkeypatch.setattr(gpu_policies, "problem", lambda name, place: ran.append(name) or problem(name, place))
    monkeypatch.setattr(sys, "argv", ["gpu_policies", "--json", str(results)])
    gpu_policies.main()
    assert ran == ["bert", "gpt2"]
    figures = json.loads(results.read_text())[gpu_policies.HEADING]
    assert figures == dict.fromkeys(("Llama", "Bert", "GPT2"), gpu_policies.EQUAL)
    assert "| GPT2 | equal |" in results.with_suffix(".md").read_text()
    monkeypatch.setattr(sys, "argv", ["gpu_policies", "--seconds", "-1", "--json", str(results)])
    gpu_policies.main()  # all are due again, and none has time
    assert ran == ["bert", "gpt2"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["BigBird", "BigBirdPegasusEncoder"])
def test_policies_with_tensors_of_arrays(policy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their models make a tensor on the device from an array of numpy."""
    believe(monkeypatch)
    results = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu_policies", policy, "--json", str(results)])
    gpu_policies.main()
    assert json.loads(results.read_text())[gpu_policies.HEADING] == {policy: gpu_policies.EQUAL}


def test_wrong_output_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    believe(monkeypatch)
    monkeypatch.setattr(gpu_policies, "difference", lambda got, want: 0.5)
    monkeypatch.setattr(sys, "argv", ["gpu_policies", "Llama"])
    with pytest.raises(SystemExit, match=r"WRONG: Llama: llama: the output differs by 0\.5"):
        gpu_policies.main()
