"""The walk of docs/architecture.md from `generate` to a token is the walk that the code takes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import parallelformers_ng
from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup

ROOT = Path(parallelformers_ng.__file__).parent
MAP = ROOT.parent / "docs" / "architecture.md"
ASIDE = ("errors.py", "progress.py", "interrupts.py")
"""Files that a call may enter without a place in the walk."""


class FileTrace:
    """Notes which files of the package the functions that this thread enters are in."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{ROOT}/") and not path.endswith(ASIDE):
            name = path[len(f"{ROOT}/") :]
            if name not in self.files:
                self.files.append(name)


TRACE = FileTrace()
"""Of this process: of the test, or of a worker."""


class TraceSwitch(LogitsProcessor):
    """Crosses to the workers with a call of `generate`, and begins a trace there, or ends it and writes it down."""

    def __init__(self, directory: Path, on: bool) -> None:
        self.directory, self.on = str(directory), on

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.on:
            TRACE.files.clear()
            sys.setprofile(TRACE)
        else:
            sys.setprofile(None)
            Path(self.directory, str(os.getpid())).write_text("\n".join(TRACE.files))
        return scores


def walk(title: str) -> list[str]:
    """The files that a section of the map names, in its order; a name without a room is of the room before it."""
    section = MAP.read_text().split(f"## {title}", 1)[1].split("\n## ", 1)[0]
    files, room = [], ""
    for name in re.findall(r"`([\w/]+\.py)`", section):
        path = name if "/" in name or not (ROOT / room / name).exists() else f"{room}/{name}"
        room = path.rpartition("/")[0]
        files.append(path)
    return files


def test_the_map_names_files_that_exist() -> None:
    for title in ("From `parallelize(model, 2)`", "From `model.generate(ids)`"):
        assert walk(title)
        assert [name for name in walk(title) if not (ROOT / name).exists()] == []


def test_generate_enters_the_files_of_the_map(groups: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = parallelize(LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).eval(), workers=groups(2))
    prompt = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "max_new_tokens": 4, "do_sample": False}

    def switch(on: bool) -> None:
        model.generate(**prompt, logits_processor=LogitsProcessorList([TraceSwitch(tmp_path, on)]))

    with model:
        switch(True)
        TRACE.files.clear()
        sys.setprofile(TRACE)
        model.generate(**prompt)
        sys.setprofile(None)
        here = list(TRACE.files)
        switch(False)
    there = [path.read_text().splitlines() for path in tmp_path.iterdir()]
    assert len(there) == 2
    named = set(walk("From `model.generate(ids)`"))
    # A worker's trace also holds the ends of the calls that switch it, which bring a processor back.
    assert set(here) <= named
    assert here[0] == "model/remote_tree.py"
    print(len(set(here)), sorted(set(here)), sorted(set(there[0]) - set(here)))
