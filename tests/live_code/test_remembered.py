"""Tests the digests that the process which forks ranks computes for all of them."""

import pytest
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from parallelformers_ng.live_code import changes
from parallelformers_ng.live_code.content import digest
from parallelformers_ng.live_code.reach import reach


def test_remembered_functions_have_equal_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = reach([LlamaForCausalLM])
    caller = changes.digests_of(slots)
    assert changes.differences(caller) == {}
    monkeypatch.setattr(changes, "_REMEMBERED", {})
    changes.remember_functions([LlamaForCausalLM])
    assert len(changes._REMEMBERED) > 300
    monkeypatch.setattr(changes, "digest", lambda value: b"" if callable(value) else digest(value))
    names = ("rotate_half", "LlamaAttention.forward", "LlamaModel.forward")
    places = {f"{modeling_llama.__name__}:{name}" for name in names}
    assert not changes.differences(caller).keys() & places, "remembered functions are not digested again"


def test_function_replaced_after_remembering_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_REMEMBERED", {})
    changes.remember_functions([LlamaForCausalLM])
    place = f"{modeling_llama.__name__}:rotate_half"
    caller = {place: digest(modeling_llama.rotate_half)}
    assert changes.differences(caller) == {}
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: -x)
    assert changes.differences(caller).keys() == {place}
