"""Runs a program in sandboxes: without some system calls, and with a /proc that shows no system files."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
_NUMBERS = {"sched_setaffinity": 203, "memfd_create": 319, "pidfd_open": 434}
"""Numbers of system calls on x86-64 (arch/x86/entry/syscalls/syscall_64.tbl of Linux)."""
_BLOCK = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, {number}), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(filters)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
"""
"""Makes a system call fail with EPERM, here and in children: PR_SET_NO_NEW_PRIVS, and PR_SET_SECCOMP with a BPF program
that loads the call's number, compares it, and returns SECCOMP_RET_ERRNO or SECCOMP_RET_ALLOW (linux/seccomp.h)."""
_RUN = """
import torch
from parallelformers_ng import ParallelError, parallelize
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)).eval()
ids = torch.tensor([[1, 2, 3]])
try:
    with torch.no_grad():
        whole = model(ids).logits
        same = torch.allclose(parallelize(model, 2, workers={"device": "cpu"})(ids).logits, whole, atol=1e-4)
    print("equal" if same else "other numbers")
except ParallelError as error:
    print("refused:", error)
"""


def output_of(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return ended.stdout + ended.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64")
@pytest.mark.parametrize(
    ("name", "words"),
    [("sched_setaffinity", "equal"), ("memfd_create", "refused: .*memfd"), ("pidfd_open", "refused: .*pidfd")],
)
def test_blocked_system_calls_are_named_or_ignored(name: str, words: str) -> None:
    output = output_of(sys.executable, "-c", _BLOCK.format(number=_NUMBERS[name]) + _RUN)
    assert re.search(words, output), output


def test_proc_without_system_files_is_named() -> None:
    mount = "mount -t proc -o subset=pid proc /proc"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this process may not mount /proc")
    output = output_of("unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, _RUN)
    assert "subset=pid" in output or "equal" in output, output
