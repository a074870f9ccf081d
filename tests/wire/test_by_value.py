"""Tests values of the program's own modules that are pickled by value."""

from __future__ import annotations

import functools
import io
import pickle
import types
from typing import Any

import torch

from parallelformers_ng.live_code.state import State
from parallelformers_ng.wire.by_value import ByValuePickler

CODE = """
import functools

@functools.lru_cache(maxsize=7)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
"""


def _again(value: Any) -> Any:
    buffer = io.BytesIO()
    ByValuePickler(buffer, protocol=5).dump(value)
    return pickle.loads(buffer.getvalue())


def test_functions_with_a_cache() -> None:
    program = types.ModuleType("__main__")
    exec(CODE, vars(program))
    function = _again(program.fibonacci)
    assert function(10) == 55
    assert function.cache_parameters()["maxsize"] == 7
    assert function is not program.fibonacci


def test_cached_properties() -> None:
    class Circle:
        radius = 2

        @functools.cached_property
        def area(self) -> float:
            return 3 * self.radius**2

    circle = _again(Circle)()
    assert circle.area == 12
    assert vars(circle) == {"area": 12}


def test_functions_of_a_library_go_by_name() -> None:
    from transformers.utils.import_utils import is_torch_available

    assert isinstance(is_torch_available, functools._lru_cache_wrapper)
    assert _again(is_torch_available) is is_torch_available


def test_tensors_of_eight_bits() -> None:
    numbers = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    again = _again(numbers)
    assert again.dtype is numbers.dtype
    assert again.float().tolist() == [1.0, -2.0]


def test_changes_in_a_sparse_tensor_are_seen() -> None:
    numbers = torch.eye(2).to_sparse()
    state = State(numbers)
    assert state.holds()
    numbers.mul_(2)
    assert not state.holds()
