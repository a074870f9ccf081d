"""Tests that wrong arguments end the commands in words, before the import of torch, and that `| head` is quiet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.helpers.ended_commands import ended

_WRONG = [
    ("plan no/such/model", "argument MODEL: the folder no/such/model does not exist"),
    ("plan {empty}", "argument MODEL: the folder {empty} is of another kind: it has no config.json"),
    ("plan llama --num-gpus 0", "argument --num-gpus: '0' is no number of at least 1"),
    ("plan llama --num-gpus two", "argument --num-gpus: 'two' is no number"),
    ("plan llama --quantize int3", "argument --quantize: invalid choice: 'int3'"),
    ("plan llama --dtype foo", "argument --dtype: invalid choice: 'foo'"),
    ("plan llama --ratio 1,x", "argument --ratio: '1,x' has no numbers with commas"),
    ("plan llama --ratio 1,2,3", "ratio has 3 numbers, and there are 2 ranks"),
    ("plan llama --ratio=-1,2", "ratio is [-1.0, 2.0]"),
    ("plan llama --strategy circle", "argument --strategy: invalid choice: 'circle'"),
    ("plan llama --tensor 2", "tensor is 2 and strategy 'tensor'"),
    ("plan llama --policy absent.py", "argument --policy: policy is 'absent.py', which cannot be read"),
    ("plan llama --device h999", "argument --device: device 'h999' is unknown"),
    ("plan llama --device h100 --batch 0", "argument --batch: '0' is no number"),
    ("plan llama --batch 2", "--batch is for a forecast"),
    ("plan llama --device h100 --ratio 1,1", "--ratio is for a plan"),
    ("verify llama --num-gpus -1", "argument --num-gpus"),
    ("verify llama --quantize int3", "argument --quantize"),
    ("shard llama out --num-gpus 0", "argument --num-gpus: '0' is no number"),
    ("shard ./absent out", "argument MODEL: the folder ./absent does not exist"),
    ("shard llama out --max-shard-size huge", "argument --max-shard-size: max_shard_size is 'huge'"),
    ("bench llama --prompt 0", "argument --prompt: '0' is no number"),
    ("bench llama --tokens x", "argument --tokens: 'x' is no number"),
    ("bench llama --dtype int8", "argument --dtype: invalid choice: 'int8'"),
]


def test_wrong_arguments_end_commands_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    words = [line.format(empty=tmp_path / "empty").split() for line, _ in _WRONG]
    for (line, why), (status, text, has_torch) in zip(_WRONG, ended(words, tmp_path), strict=True):
        assert why.format(empty=tmp_path / "empty") in text, (line, text)
        assert (status, len(text.splitlines()), has_torch) == (2, 1, False), line


def test_reader_that_ends_early_ends_the_command_quietly() -> None:
    run = [sys.executable, "-m", "parallelformers_ng", "policies", "--json"]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 141)  # type: ignore[union-attr]
