"""Copies tensors from mapped files to a device through two page-locked buffers of fixed size.

For a copy from pageable memory the CUDA driver uses such a buffer too, but waits for each piece. Here the CPU fills one
buffer while the device copies from the other buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BUFFER_BYTES = 64 << 20


class Staging:
    """Two buffers in host memory, used in turn, for copies of tensors from the CPU to a device.

    Args:
        pin: whether to use pinned memory, which needs CUDA. Only copies from pinned memory are asynchronous.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES, pin: bool = True) -> None:
        self._device = device
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self._copy_events = [torch.cuda.Event() if device.type == "cuda" else None for _ in range(2)]
        self._turn = 0

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor on the device, in the tensor's shape and data type.

        When this returns, the caller may change `source`. Work that is queued later on the device's current stream sees
        the complete copy.
        """
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        for part, place in _pieces(source, target, self._buffers[0].numel()):
            self._send(part, place)
        return target

    def _send(self, part: torch.Tensor, place: torch.Tensor) -> None:
        buffer, event = self._buffers[self._turn], self._copy_events[self._turn]
        self._turn = 1 - self._turn
        if event is not None:
            event.synchronize()  # do not overwrite the buffer before the last copy from it is done
        staged = buffer[: part.nbytes].view(part.dtype).view(part.shape)
        staged.copy_(part)
        place.copy_(staged, non_blocking=True)
        if event is not None:
            event.record()


def _pieces(source: torch.Tensor, target: torch.Tensor, limit: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if source.nbytes <= limit:
        if source.numel():
            yield source, target
        return
    rows = limit * len(source) // source.nbytes
    if rows:
        yield from zip(source.split(rows), target.split(rows), strict=True)
        return
    for row, place in zip(source, target, strict=True):
        yield from _pieces(row, place, limit)
