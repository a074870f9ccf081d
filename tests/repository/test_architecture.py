"""Tests that docs/architecture.md names the files that a call of `generate` enters."""

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
ASIDE = "errors.py"
"""File that a call may enter although the walk does not name it."""


class FileTrace:
    """A profiler that records, request by request, the package's files whose functions this thread enters."""

    def __init__(self) -> None:
        self.requests: list[list[str]] = [[]]

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        path, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if event != "call" or not path.startswith(f"{ROOT}/") or path.endswith(ASIDE):
            return
        if function == "Service._next":  # a worker waits for the next request
            self.requests.append([])
        name = path[len(f"{ROOT}/") :]
        if name not in self.requests[-1]:
            self.requests[-1].append(name)


class TraceSwitch(LogitsProcessor):
    """A processor that `generate` sends to the workers. On a worker it starts a trace, or ends and saves the trace."""

    def __init__(self, directory: Path, on: bool) -> None:
        self.directory, self.on = str(directory), on

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.on:
            sys.setprofile(FileTrace())
        elif isinstance(trace := sys.getprofile(), FileTrace):
            sys.setprofile(None)
            Path(self.directory, str(os.getpid())).write_text("\n".join(trace.requests[1]))
        return scores


def walk() -> set[str]:
    """Return the files that the map names on the way from `generate` to a token."""
    section = MAP.read_text().split("## From `model.generate(ids)`", 1)[1].split("\nA call with more", 1)[0]
    return set(re.findall(r"`(\w+/\w+\.py)`", section))


def test_generate_enters_only_files_of_the_map(groups: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=96, eos_token_id=None, **sizes)
    prompt = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "max_new_tokens": 4, "do_sample": False}
    own_trace = FileTrace()
    with parallelize(LlamaForCausalLM(config).eval(), workers=groups(2)) as model:

        def switch(on: bool) -> None:
            model.generate(**prompt, logits_processor=LogitsProcessorList([TraceSwitch(tmp_path, on)]))

        switch(on=True)
        sys.setprofile(own_trace)
        model.generate(**prompt)
        sys.setprofile(None)
        switch(on=False)
    ranks = [path.read_text().splitlines() for path in tmp_path.iterdir()]
    assert len(ranks) == 2
    for names in ranks:
        files = {*own_trace.requests[0], *names}
        # With the C kernels, `kernels/` computes the prompt; without them, `sharding/heads.py` does.
        depends_on_build = ("kernels/", "collectives/", "sharding/heads.py")
        assert {name for name in walk() if not name.startswith(depends_on_build)} <= files <= walk()
    assert len(walk()) <= 27
