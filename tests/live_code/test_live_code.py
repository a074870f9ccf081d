"""Tests digests of code, which compare the caller's code with a rank's code."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from parallelformers_ng.live_code.changes import ABSENT, is_filled_in
from parallelformers_ng.live_code.content import digest
from parallelformers_ng.live_code.reach import Slot

_DIGESTS = """
import importlib
from parallelformers_ng.live_code.content import digest
for name in {names}:
    module = importlib.import_module(f"transformers.models.{{name}}.modeling_{{name}}")
    found = {{
        f"{{cls.__qualname__}}.{{key}}": digest(value).hex()
        for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__
        for key, value in vars(cls).items() if callable(value)
    }}
print(found)
"""


def digests(*names: str) -> str:
    """Return the digests of the last module, from a process that has digested all other modules before."""
    run = [sys.executable, "-c", _DIGESTS.format(names=names)]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("names", [("roberta", "camembert"), pytest.param(("llama", "qwen2"), marks=pytest.mark.slow)])
def test_digests_are_independent_of_their_order(names: tuple[str, str]) -> None:
    assert digests(names[1]) == digests(*names)


@pytest.mark.parametrize("name", ["rotate_half", "repeat_kv"])
def test_equal_code_with_other_globals_differs(name: str) -> None:
    function = getattr(modeling_llama, name)
    copied = types.FunctionType(function.__code__, {**vars(modeling_llama), "__name__": "copied"}, name)
    assert digest(copied) != digest(function)


def test_notes_of_transformers_in_classes_are_no_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("_can_set_attn_implementation", "_can_set_experts_implementation")
    for cls in LlamaForCausalLM.__mro__:
        for name in names:
            monkeypatch.delattr(cls, f"{name}_cached_value", raising=False)

    class OfTheProgram(LlamaForCausalLM):
        pass

    def note(key: str) -> Slot:
        return Slot(f"program:OfTheProgram.{key}", OfTheProgram, key, value=True, of_step=True)

    for name in names:
        getattr(OfTheProgram, name)()
        (noted,) = [key for key in vars(OfTheProgram) if key.startswith(name)]
        assert is_filled_in(note(noted), ABSENT)
        assert not is_filled_in(note(noted), digest(False))
    assert not is_filled_in(note("_cached_value"), ABSENT)
