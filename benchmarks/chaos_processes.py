"""Tests processes: killed parents, Ctrl-C in a REPL, many starts one after another and at once."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from tqdm import tqdm

from benchmarks.chaos_figures import Figure
from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers.patience import workers_of
from tests.helpers.terminal import Terminal
from tests.zoo.case import token_ids
from tests.zoo.decoders import gpt2

_ROOT = Path(__file__).parent.parent


def parents(count: int, seed: int) -> list[Figure]:
    """Fork a child process that parallelizes a model, and kill the child at a random moment, `count` times.

    Most kills hit the start of the workers, which takes long. Other kills hit calls of the model.
    """
    source = random.Random(seed)
    folder = tempfile.mkdtemp()
    shared = set(os.listdir("/dev/shm"))
    seconds, left = [], 0
    for _ in tqdm(range(count), "parents", disable=None):
        ready, announce = os.pipe()
        child = os.fork()
        if child == 0:
            _be_a_parent(folder, source.choice(["auto", "gloo"]), announce)
        os.close(announce)
        if source.random() < 0.2:
            os.read(ready, 1)
            time.sleep(source.uniform(0.0, 0.3))
        else:
            time.sleep(source.uniform(0.0, 6.0))
        os.close(ready)
        os.kill(child, signal.SIGKILL)
        killed = time.monotonic()
        os.waitpid(child, 0)
        while (alive := workers_of(child)) and time.monotonic() < killed + 10:
            time.sleep(0.02)
        seconds.append(time.monotonic() - killed)
        left += len(alive) + len(os.listdir(folder)) + len(set(os.listdir("/dev/shm")) - shared)
    shutil.rmtree(folder)
    return [
        Figure("kill to last worker gone, max, s", "max", 2.0, seconds),
        Figure("processes, names and files left", "sum", 0, [left]),
    ]


def _be_a_parent(folder: str, backend: str, announce: int) -> None:
    """Run calls in the forked child until the kill. Any error ends the child, which must never run the suite."""
    try:
        tempfile.tempdir = folder
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        model = parallelize(gpt2(), 2, workers={"device": "cpu", "backend": backend})
        os.write(announce, b"!")
        while True:
            model.generate(token_ids(), max_new_tokens=8, do_sample=False)
    finally:
        os._exit(1)


_REPL = """
import torch; torch.set_num_threads(1)
from parallelformers_ng import parallelize
from parallelformers_ng.model.parallelized import deployment_of
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2
inputs = text_inputs(); model = gpt2(); want = model.generate(**inputs, max_new_tokens=8, do_sample=False)
_ = parallelize(model, 2, workers={"device": "cpu"}); pids = deployment_of(model).pids
def right(): return torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), want)
"""
_LOOPS = (
    "while True: out = model.generate(inputs['input_ids'], max_new_tokens=50, do_sample=False)\n\n",
    "while True: out = model(inputs['input_ids'])\n\n",
    "while True: out = model.generate(**inputs, max_new_tokens=3, do_sample=True, seed=1)\n\n",
)


def interrupts(count: int, seed: int) -> list[Figure]:
    """Press Ctrl-C in a REPL while a loop of calls runs, and check the next answer."""
    source = random.Random(seed)
    seconds, wrong, restarts, zombies = [], 0, 0, 0
    with tempfile.TemporaryDirectory() as folder, Terminal({**os.environ, "PYTHONPATH": str(_ROOT)}) as terminal:
        Path(folder, "repl.py").write_text(_REPL)
        terminal.read_until(">>> ", 60)
        terminal.type(f"exec(open({folder + '/repl.py'!r}).read())\n")
        terminal.read_until("\n>>> ", 180)
        for _ in tqdm(range(count), "interrupts", disable=None):
            terminal.type(source.choice(_LOOPS))
            terminal.read_until(r"\.\.\. ", 10)
            time.sleep(source.uniform(0.0, 0.6))
            terminal.type("\x03")
            pressed = time.monotonic()
            terminal.read_until("\n>>> ", 30)
            seconds.append(time.monotonic() - pressed)
            terminal.type("print('next', right(), deployment_of(model).pids == pids)\n")
            answer = re.search(r"next (True|False) (True|False)", terminal.read_until(r"next \w+ .*\n>>> ", 60))
            assert answer is not None
            wrong += answer[1] != "True"
            restarts += answer[2] != "True"
            zombies += sum(
                p.status() == psutil.STATUS_ZOMBIE for p in psutil.Process(terminal.pid).children(recursive=True)
            )
    return [
        Figure("Ctrl-C to prompt, max, s", "max", 1.0, seconds),
        Figure("wrong next answers", "sum", 0, [wrong]),
        Figure("groups lost", "sum", 0, [restarts]),
        Figure("zombies", "sum", 0, [zombies]),
    ]


def cycles(count: int, seed: int) -> list[Figure]:
    """Parallelize and deparallelize a model, and return the growth since the second cycle, and the printed lines."""
    me, model, ids = psutil.Process(), gpt2(), token_ids(seed=seed)
    states = []
    with _captured() as printed:
        for _ in range(count + 2):
            parallelize(model, 2, workers={"device": "cpu"})
            model(ids)
            model.deparallelize()
            states.append(
                (me.num_fds(), threading.active_count(), len(me.children(recursive=True)), me.memory_info().rss)
            )
    more = [last - first for first, last in zip(states[1], states[-1], strict=True)]
    if printed:
        print(printed[0], file=sys.stderr)
    return [
        Figure("more descriptors", "sum", 0, [more[0]]),
        Figure("more threads", "sum", 0, [more[1]]),
        Figure("more processes", "sum", 0, [more[2]]),
        Figure("more resident memory, MB", "sum", 5.0, [more[3] / 1e6]),
        Figure("lines printed", "sum", 0, [sum(len(text.splitlines()) for text in printed)]),
    ]


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """Collect the output of this process and its children. The list is complete after the block."""
    texts: list[str] = []
    originals = os.dup(1), os.dup(2)
    file = os.memfd_create("printed", os.MFD_CLOEXEC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        yield texts
    finally:
        for number, fd in enumerate(originals, 1):
            os.dup2(fd, number)
            os.close(fd)
        size = os.fstat(file).st_size
        texts += [os.pread(file, size, 0).decode(errors="replace")] if size else []
        os.close(file)


def starts(count: int, seed: int) -> list[Figure]:
    """Start 8 groups at once, which connect their ranks over sockets, and check answers and listening addresses.

    Groups must not use the same address, and must listen only on loopback.
    """
    errors, listeners, beyond = 0, 0, 0

    def start(number: int) -> WorkerGroup | Exception:
        try:
            return WorkerGroup(
                2, target="tests.helpers.runtime_target:Target", backend="gloo", threads=1, start_timeout=120
            )
        except Exception as error:  # counted below
            return error

    for _ in tqdm(range(count), "starts", disable=None):
        with ThreadPoolExecutor(8) as pool:
            groups = list(pool.map(start, range(8)))
        for group in groups:
            if isinstance(group, Exception):
                print(repr(group), file=sys.stderr)
                errors += 1
                continue
            addresses = [address for pid in group.pids for address in _listening(pid)]
            listeners += len(addresses)
            beyond += sum(not ipaddress.ip_address(address).is_loopback for address in addresses)
            errors += group.call("sum_of_ranks", 1.0) != 3.0
            group.close()
    return [
        Figure("groups that did not start, or answered wrong", "sum", 0, [errors]),
        Figure("listeners beyond loopback", "sum", 0, [beyond]),
    ]


def _listening(pid: int) -> list[str]:
    return [
        connection.laddr.ip
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    ]
