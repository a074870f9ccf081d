"""Tests indexing with a list of one number: the result is right, and the list is not converted to a tensor."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from parallelformers_ng.generation.single_indices import _sliced
from tests.helpers.operator_recorder import Tape

INDICES: dict[str, Any] = {
    "last but one, as Falcon": (..., [-2], slice(None)),
    "last": (slice(None), slice(None), [-1]),
    "alone": [1],
    "of a new dimension": (0, None, [2]),
}
OTHERS: dict[str, Any] = {
    "several": (..., [0, 2], slice(None)),
    "two lists, which select together": ([0], [1]),
    "beside a tensor": ([0], torch.tensor([1, 2])),
    "a bool": (slice(None), slice(None), [True, False, True, False]),
    "no list": (..., 0),
    "no tuple": 1,
}
sliced = _sliced(Tensor.__getitem__)


def indices_made(tensor: Tensor, index: Any) -> int:
    with torch.inference_mode(), (tape := Tape()):
        sliced(tensor, index)
    return [call[0] for call in tape._calls].count(torch.ops.aten.index.Tensor)


@pytest.mark.parametrize("index", [*INDICES.values(), *OTHERS.values()], ids=[*INDICES, *OTHERS])
def test_the_same_is_selected(index: Any) -> None:
    tensor = torch.randn(2, 3, 4)
    selected = sliced(tensor, index)
    assert torch.equal(selected, tensor[index])
    if index in INDICES.values():
        assert not selected._is_view()


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_no_index_is_made(index: Any) -> None:
    assert indices_made(torch.randn(2, 3, 4), index) == 0


def test_a_number_out_of_range_is_an_error() -> None:
    for index in ((..., [4]), [-3]):
        with pytest.raises(IndexError, match="out of bounds"):
            sliced(torch.randn(2, 3, 4), index)
    assert sliced(torch.randn(2, 0, 4), (0, slice(None), [1])).shape == (0, 1)


IN_A_WORKER = """
import torch
from parallelformers_ng.generation.single_indices import slice_single_indices

plain = torch.tensor
lists = ([torch.tensor(-2), torch.tensor(3)], [[torch.tensor(1.5)], [torch.tensor(2.5)]], [torch.tensor(1), 2.5],
         [torch.tensor(1.0, dtype=torch.float64), 2], [torch.tensor(1.5, dtype=torch.float16), True],
         (torch.tensor(1, dtype=torch.int32), torch.tensor(2, dtype=torch.int16)), [torch.tensor([7])], [1, 2], [[]], 3)
before = [torch.tensor(each) for each in lists]
slice_single_indices()
for each, want in zip(lists, before, strict=True):
    got = torch.tensor(each)
    assert got.dtype is want.dtype and torch.equal(got, want), each
    assert torch.equal(torch.as_tensor(each, dtype=torch.float64), want.double()), each
assert torch.tensor(lists[0], dtype=torch.float64).dtype is torch.float64
tensor = torch.randn(2, 3, 4)
compiled = torch.compile(lambda x: x[..., [-2], :] * 2, backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(tensor), tensor[:, 1:2] * 2)
"""


def test_compiler_and_lists_work_in_a_worker() -> None:
    """The test runs in a separate process, because a `__getitem__` in Python changes the class permanently."""
    subprocess.run([sys.executable, "-c", IN_A_WORKER], check=True, timeout=120)
