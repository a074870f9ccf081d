"""Tests the digests that the process which forks ranks computes for all of them."""

import pytest
from transformers import GenerationMixin, LlamaForCausalLM

from parallelformers_ng.live_code import changes
from parallelformers_ng.live_code.content import digest
from parallelformers_ng.live_code.reach import reach

_METHOD = "prepare_inputs_for_generation"
_PLACE = f"{GenerationMixin.__module__}:GenerationMixin.{_METHOD}"


def test_remembered_functions_have_equal_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = reach([LlamaForCausalLM])
    caller = changes.digests_of(slots)
    assert changes.differences(caller) == {}
    monkeypatch.setattr(changes, "_REMEMBERED", {})
    changes.remember_functions([LlamaForCausalLM])
    assert len(changes._REMEMBERED) > 300
    monkeypatch.setattr(changes, "digest", lambda value: b"" if callable(value) else digest(value))
    places = {f"{LlamaForCausalLM.__module__}:LlamaForCausalLM.forward", _PLACE}
    assert places <= changes._REMEMBERED.keys()
    assert not changes.differences(caller).keys() & places, "remembered functions are not digested again"


def test_function_replaced_after_remembering_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_REMEMBERED", {})
    changes.remember_functions([LlamaForCausalLM])
    caller = {_PLACE: digest(getattr(GenerationMixin, _METHOD))}
    assert changes.differences(caller) == {}
    monkeypatch.setattr(GenerationMixin, _METHOD, lambda self, ids: {"input_ids": ids})
    assert changes.differences(caller).keys() == {_PLACE}
