"""Tests copies to a device through a bounded buffer, with the CPU as the device."""

from __future__ import annotations

import pytest
import torch

from parallelformers_ng.checkpoint.staging import Staging

CPU = torch.device("cpu")


@pytest.mark.parametrize("buffer_bytes", [64, 256, 1 << 20])
@pytest.mark.parametrize(
    "source",
    [
        torch.randn(40, 12),
        torch.randn(40, 12).t(),
        torch.randn(7, 5, 12)[:, 1:4],
        torch.randn(3, 50).to(torch.bfloat16),
        torch.arange(300, dtype=torch.uint8),
        torch.tensor(2.5),
        torch.empty(0, 4),
    ],
    ids=["rows", "transposed", "sliced", "long rows", "bytes", "scalar", "empty"],
)
def test_copy_equals_its_source(source: torch.Tensor, buffer_bytes: int) -> None:
    staging = Staging(CPU, buffer_bytes, pin=False)
    for _ in range(2):  # the second time the buffers still hold the first copy
        arrived = staging.to_device(source)
        assert arrived.is_contiguous()
        assert arrived.dtype == source.dtype
        assert torch.equal(arrived, source)
        assert arrived.data_ptr() != source.data_ptr() or not source.numel()


def test_no_piece_is_larger_than_the_buffer() -> None:
    sizes: list[int] = []

    class Watched(Staging):
        def _send(self, part: torch.Tensor, place: torch.Tensor) -> None:
            sizes.append(part.nbytes)
            super()._send(part, place)

    Watched(CPU, 100, pin=False).to_device(torch.randn(9, 60))
    assert max(sizes) <= 100
    assert sum(sizes) == 9 * 60 * 4
