"""Tests that exceptions of the program's signal handlers reach the program, also where the library expects
exceptions of foreign code."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from parallelformers_ng import parallelize
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.live_code.content import digest
from tests.strangers.agreement import assert_agree, prompt
from tests.zoo.decoders import decoder


class Interrupted(Exception):
    """Raised by the program's signal handler."""


def interrupt(*_: Any) -> None:
    raise Interrupted


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


def strike(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGUSR1)


class Struck:
    """A hook and processor that a signal interrupts when it is pickled."""

    __reduce__ = __deepcopy__ = strike

    def __call__(self, *args: Any) -> Any:
        return args[-1]


class Striking(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, **others: Any) -> Any:
        strike()


def test_searches_for_policies_are_interrupted() -> None:
    with pytest.raises(Interrupted):
        make_twin(Striking, decoder("Llama").config)


def test_parallelize_is_interrupted(groups) -> None:
    model = decoder("Llama")
    model.extra = Struck()
    with pytest.raises(Interrupted):
        parallelize(model, workers=groups(2))
    del model.extra
    with parallelize(model, workers=groups(2)):
        assert_agree(model, decoder("Llama"), prompt())


def test_calls_are_interrupted(groups) -> None:
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        with pytest.raises(Interrupted):
            model.generate(prompt(), logits_processor=[Struck()], max_new_tokens=3)
        with pytest.raises(Interrupted):
            model.register_forward_hook(Struck())
        assert_agree(model, decoder("Llama"), prompt())


def test_digests_are_interrupted() -> None:
    class StruckDecimal(Decimal):
        __reduce_ex__ = strike

    StruckDecimal.__module__ = "decimal"
    with pytest.raises(Interrupted):
        digest(StruckDecimal(1))
