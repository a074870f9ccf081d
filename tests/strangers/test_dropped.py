"""Tests that a model deleted or rebound without `deparallelize()` leaves no memory and no file in the caller's
process."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelformers_ng import parallelize
from tests.helpers.patience import PROMPTLY
from tests.strangers.agreement import NEW_TOKENS, assert_agree_in_a_batch, prompt
from tests.zoo.decoders import decoder, gpt2


def open_files() -> list[str]:
    """Return this process's open files, without the numbers of sockets and pipes."""
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(link).partition(":[")[0] for link in links if link.is_symlink())


def opened_since(files: list[str]) -> list[str]:
    """Return the files opened since; files of other tests may have been closed in the meantime."""
    return [*(Counter(open_files()) - Counter(files)).elements()]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def used(model: Any, tmp_path: Path) -> Any:
    model = parallelize(model, 2, progress=False)
    model(prompt(5))
    return model


def used_by_threads(model: Any, tmp_path: Path) -> Any:
    whole = gpt2()
    model = parallelize(model, 2, progress=False, batching=True)
    assert_agree_in_a_batch(model, whole, [prompt(5), prompt(7, seed=2)])
    return model


def read_from_files(model: Any, tmp_path: Path) -> Any:
    if not (tmp_path / "config.json").exists():
        model.save_pretrained(tmp_path)
    model = parallelize(str(tmp_path), 2, progress=False)
    model.generate(prompt(5), **NEW_TOKENS)
    return model


def hooked(model: Any, tmp_path: Path) -> Any:
    model = used(model, tmp_path)
    model.register_forward_hook(lambda module, args, output: output if module is model else None)
    model(prompt(5))
    return model


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "called": used,
    "called by threads": used_by_threads,
    "read from files": read_from_files,
    "in a cycle with its hook": hooked,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_is_rebound_leaves_nothing_open(way: str, tmp_path: Path) -> None:
    model = WAYS[way](gpt2(), tmp_path)
    del model
    gc.collect()
    files, threads = open_files(), threading.active_count()
    for _ in range(4):
        model = WAYS[way](gpt2(), tmp_path)
    del model
    gc.collect()
    assert not opened_since(files)
    assert threading.active_count() <= threads


def test_weights_are_freed_with_the_last_reference() -> None:
    """The weights are freed without a run of the garbage collector."""
    used(gpt2(), Path())
    gc.collect()
    files = open_files()
    gc.disable()
    try:
        model = used(gpt2(), Path())
        assert opened_since(files)
        model = None  # noqa: F841  what a cell does that binds its name anew
        until = time.monotonic() + PROMPTLY  # its supervisor thread ends after the group
        while opened_since(files) and time.monotonic() < until:
            time.sleep(0.01)
        assert not opened_since(files)
    finally:
        gc.enable()


@pytest.mark.slow
def test_memory_is_stable_over_500_reruns() -> None:
    files, memory = list[str](), 0
    for number in range(500):
        model = parallelize(decoder("Llama"), 2, progress=False)
        with torch.no_grad():
            model(prompt(5))
        if number == 20:  # allocators and caches no longer grow from here on
            files, memory = open_files(), resident_bytes()
    assert not opened_since(files)
    assert resident_bytes() - memory < 8 << 20
