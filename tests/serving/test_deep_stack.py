"""Tests the thread with a large stack, in which llguidance reads a grammar."""

from __future__ import annotations

import pytest

from parallelformers_ng.serving.processors import _with_deep_stack


def test_errors_arrive() -> None:
    assert _with_deep_stack(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        _with_deep_stack(lambda: 1 // 0)
