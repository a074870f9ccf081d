"""Tests that pages of a mapped file have the file's contents, for any memory behind the pages."""

from __future__ import annotations

import errno
import mmap
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallelformers_ng.checkpoint.mapping import file_at, map_file
from parallelformers_ng.offload import moves, pages
from parallelformers_ng.offload.moves import MappedLayer, Moves

_COUNTS = (3 << 20, 9000, 1 << 20, 5000)
"""Bytes of consecutive tensors: pieces, pages of 2 MB, parts of a page, the end of a file within a page."""


@pytest.fixture
def tensors(tmp_path: Path) -> list[torch.Tensor]:
    """Return three of four views of a mapped file; no layer has the second view."""
    path = tmp_path / "file"
    path.write_bytes(torch.arange(sum(_COUNTS)).to(torch.uint8).numpy().tobytes())
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        mapping = map_file(file.fileno())
    views = torch.frombuffer(mapping, dtype=torch.uint8).split(_COUNTS)
    return [views[0], views[2], views[3]]


def bytes_behind(tensor: torch.Tensor, kind: str = "Anonymous") -> int:
    """Return the bytes of a tensor's pages that are of a kind: by default memory of this process, not of the file."""
    size, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            ours = start < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < end
        size += int(others[0]) * 1024 if ours and first == f"{kind}:" else 0
    return size


@pytest.mark.parametrize("direct", [True, False], ids=["copies", "the system's cache"])
def test_a_layer_is_right_at_any_time(
    tensors: list[torch.Tensor], direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(moves, "source_of", lambda stretch: None)
    want = [tensor.clone() for tensor in tensors]
    layer = MappedLayer(nn.Module(), tensors)
    for _ in range(3):
        assert bytes_behind(tensors[0]) == 0
        layer.bring()
        assert (bytes_behind(tensors[0]) >= tensors[0].nbytes) is direct
        assert all(map(torch.equal, tensors, want))
        layer.drop()
        assert bytes_behind(tensors[0], "Rss") < tensors[0].nbytes // 2, "the pages stay in memory"
        assert all(map(torch.equal, tensors, want))


def test_pages_that_two_layers_share(tensors: list[torch.Tensor]) -> None:
    want = [tensor.clone() for tensor in tensors]
    one, two = MappedLayer(nn.Module(), tensors[:1]), MappedLayer(nn.Module(), tensors[1:])
    one.bring()
    two.bring()
    one.drop()
    assert all(map(torch.equal, tensors, want))
    two.drop()
    assert all(map(torch.equal, tensors, want))


@pytest.mark.parametrize("fails", ["read", "end", "move"])
def test_failed_reads_leave_everything_unchanged(
    tensors: list[torch.Tensor], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "no")

    want, layer = [tensor.clone() for tensor in tensors], MappedLayer(nn.Module(), tensors)
    with monkeypatch.context() as patch:
        if fails == "move":
            patch.setattr(pages, "checked", fail)  # new memory is there, and cannot be moved
        else:
            patch.setattr(os, "preadv", fail if fails == "read" else lambda *_: 0)
        with pytest.raises(OSError, match=r"no|shorter"):
            layer.bring()
    assert bytes_behind(tensors[0]) == 0
    assert all(map(torch.equal, tensors, want))
    layer.bring()
    assert all(map(torch.equal, tensors, want))


def test_memory_file_gets_huge_pages() -> None:
    with open(os.memfd_create("weights"), "r+b") as file:
        file.write(torch.arange(5 << 20).to(torch.uint8).numpy().tobytes())
        file.flush()
        mapped = torch.frombuffer(map_file(file.fileno()), dtype=torch.uint8)
    want, parts = mapped.clone(), mapped.split(3 << 20)
    thread = pages.make_huge(parts)
    assert thread is not None
    thread.join()
    assert torch.equal(mapped, want)
    if [int(part) for part in platform.release().split(".")[:2]] < [6, 1]:
        pytest.skip("Linux below 6.1 copies no pages")
    assert bytes_behind(mapped, "ShmemPmdMapped") == 4 << 20  # the last megabyte is no whole huge page
    mapped[0] += 1
    assert bytes_behind(mapped) == mmap.PAGESIZE  # the other pages stay shared
    assert pages.make_huge(mapped[: 1 << 20].split(1)) is None


class Stuck(MappedLayer):
    """A layer whose memory cannot be freed once."""

    tries = 0

    def drop(self) -> None:
        self.tries += 1
        if self.tries == 1:
            raise OSError(errno.ENOMEM, "weights cannot be mapped")


def test_failed_drop_is_raised_at_next_pass() -> None:
    stuck, other, x = Stuck(nn.Linear(2, 2)), MappedLayer(nn.Linear(2, 2)), torch.ones(2)
    layers = Moves([stuck, other])
    other.module(stuck.module(x))
    with pytest.raises(OSError, match="weights cannot be mapped"):
        stuck.module(x)
    for _ in range(2):
        other.module(stuck.module(x))
    layers.close()


def test_file_is_known_while_it_is_mapped(tensors: list[torch.Tensor]) -> None:
    address = tensors[0].data_ptr()
    file = file_at(address)
    assert file is not None
    descriptors = file.descriptor, file.direct
    assert None not in descriptors
    del file
    tensors.clear()
    assert file_at(address) is None
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
