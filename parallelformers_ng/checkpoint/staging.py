"""From mapped files to a device: through a pinned buffer of bounded size, however large the tensors are.

A copy from pageable memory is staged by the driver anyway, and waits for each piece. Here one buffer of the buffer is
filled, on the CPU, while the other is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BUFFER_BYTES = 64 << 20


class Staging:
    """Two page-locked buffers through which tensors travel.

    Args:
        device: target of the copies.
        buffer_bytes: size of each buffer.
        pin: lock the pages, without which copies are not asynchronous. Needs CUDA.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES, pin: bool = True) -> None:
        self._device = device
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self._sent = [torch.cuda.Event() if device.type == "cuda" else None for _ in range(2)]
        self._turn = 0

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy on the device. The source is read when this returns; the copy is complete for
        whatever is queued on the device's current stream afterwards."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        for part, place in _pieces(source, target, self._buffers[0].numel()):
            self._send(part, place)
        return target

    def _send(self, part: torch.Tensor, place: torch.Tensor) -> None:
        buffer, event = self._buffers[self._turn], self._sent[self._turn]
        self._turn = 1 - self._turn
        if event is not None:
            event.synchronize()  # what this buffer held last has left; at once where it held nothing
        staged = buffer[: part.nbytes].view(part.dtype).view(part.shape)
        staged.copy_(part)
        place.copy_(staged, non_blocking=True)
        if event is not None:
            event.record()


def _pieces(source: torch.Tensor, target: torch.Tensor, limit: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut both alike into pieces of at most `limit` bytes, rows first."""
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
