"""Faults that need a process of their own: interrupts, forks, kills of the parent, the end of the interpreter."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
PRELUDE = """
import os, signal, sys, threading, time
import torch
torch.set_num_threads(1)
from parallelformers_ng import parallelize
from parallelformers_ng.model import deployment_of
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2
inputs = text_inputs()
model = gpt2()
want = model.generate(**inputs, max_new_tokens=8, do_sample=False)
def right(): return torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), want)
"""
START = "parallelize(model, 2, device='cpu')\n"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", **more}


def run(arguments: list[str], text: str | None = None, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], input=text, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def workers_of(parent: int) -> list[psutil.Process]:
    """Workers that were started by a process, alive or not: its id is on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "parallelformers_ng.runtime.worker" in line and line[-1] == str(parent):
            found.append(process)
    return found


def await_end_of_workers(parent: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while left := workers_of(parent):
        assert time.monotonic() < end, left
        time.sleep(0.02)


@pytest.mark.parametrize("way", ["file", "-c", "stdin", "thread"])
def test_scripts_need_no_main_guard_and_end_quietly(way, tmp_path):
    """Also with a request in flight in a daemon thread, and with a worker that has just died."""
    ending = {
        "file": "",
        "-c": "os.kill(deployment_of(model).pids[1], signal.SIGKILL); time.sleep(0.2)\n",
        "stdin": (
            "threading.Thread(target=lambda: [right() for _ in range(10**6)], daemon=True).start()\ntime.sleep(0.2)\n"
        ),
        "thread": "",
    }[way]
    body = START + "print(right(), flush=True)\n" + ending
    if way == "thread":
        body = f"def work():\n    {START}    print(right())\nt = threading.Thread(target=work)\nt.start()\nt.join()\n"
    script = PRELUDE + body
    if way == "stdin":
        result = run(["-"], script)
    elif way == "-c":
        result = run(["-c", script])
    else:
        (tmp_path / "script.py").write_text(script)
        result = run([str(tmp_path / "script.py")])
    assert (result.stdout, result.stderr, result.returncode) == ("True\n", "", 0)


FORKED = """
import logging
from parallelformers_ng.errors import WrongProcessError
def tries():
    for action in (right, lambda: model(**inputs), model.memory_allocated, model.deparallelize):
        try:
            action()
        except WrongProcessError as error:
            yield "must parallelize the model itself" in str(error)
        else:
            yield action
sys.stdout.flush()
child = os.fork()
if child == 0:
    print(list(tries()), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(right())
model.deparallelize()
print(right())
"""


def test_a_forked_child_is_told_so_and_the_parent_goes_on():
    result = run(["-c", PRELUDE + START + FORKED])
    assert result.stdout.splitlines() == ["[True, True, True, True]", "True", "True"], result.stderr


KILLED = {
    "start": "print('now', flush=True)\n" + START,
    "hand-over": (
        "from parallelformers_ng import deployment\n"
        "hand_over = deployment.hand_over\n"
        "def slowly(*args): print('now', flush=True); hand_over(*args); time.sleep(60)\n"
        "deployment.hand_over = slowly\n" + START
    ),
    "request": START + "print('now', flush=True)\nwhile True: right()\n",
    "gloo": "parallelize(model, 2, device='cpu', backend='gloo')\nprint('now', flush=True)\nwhile True: right()\n",
}


@pytest.mark.parametrize("when", KILLED)
def test_nothing_outlives_a_killed_parent(when, tmp_path):
    shared = set(os.listdir("/dev/shm"))
    parent = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + KILLED[when]],
        env=environment(TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "now\n"
    time.sleep(0.5)
    assert len(workers_of(parent.pid)) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await_end_of_workers(parent.pid, 2)
    assert set(os.listdir("/dev/shm")) <= shared
    assert os.listdir(tmp_path) == []


class Terminal:
    """A Python REPL on a pseudo-terminal."""

    def __init__(self) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-q", "-i"], environment(PYTHON_BASIC_REPL="1"))

    def read_until(self, pattern: str, seconds: float) -> str:
        """What the terminal shows until `pattern`, which must come in time."""
        seen, end = "", time.monotonic() + seconds
        while not re.search(pattern, seen):
            assert select.select([self._fd], [], [], max(0.0, end - time.monotonic()))[0], f"no {pattern!r} in {seen!r}"
            seen += os.read(self._fd, 1 << 16).decode(errors="replace")
        return seen

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._fd)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_ctrl_c_in_a_repl_brings_the_prompt_back_and_the_next_answer_is_right(terminal, tmp_path):
    (tmp_path / "prelude.py").write_text(PRELUDE)
    terminal.read_until(">>> ", 20)
    terminal.type(f"exec(open({str(tmp_path / 'prelude.py')!r}).read())\n")
    terminal.read_until("\n>>> ", 90)
    terminal.type("_ = " + START)
    terminal.read_until("\n>>> ", 120)
    terminal.type("pids = deployment_of(model).pids; long = dict(max_new_tokens=50, do_sample=False)\n")
    terminal.read_until("\n>>> ", 10)
    for delay in (0.05, 0.2, 0.4):
        terminal.type("while True: out = model.generate(inputs['input_ids'], **long)\n\n")
        terminal.read_until(r"\.\.\. ", 10)
        time.sleep(delay)
        terminal.type("\x03")
        assert "KeyboardInterrupt" in terminal.read_until("\n>>> ", 1)
        terminal.type("print('next', right(), deployment_of(model).pids == pids)\n")
        assert "next True True" in terminal.read_until("next (True|False) .*\n>>> ", 60)


SMALL = """
import subprocess
before = os.listdir("/dev/shm")
big = torch.ones(1, 40, 48).repeat(300, 1, 1)
parallelize(model, 2, device='cpu')
print(right(), tuple(model(inputs_embeds=big).logits.shape), os.listdir("/dev/shm") == before)
"""


def test_a_tiny_dev_shm_is_enough():
    """In a mount namespace of its own, where the system lets us have one; elsewhere nothing may appear in /dev/shm."""
    may_mount = subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
    shell = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    wrapper = ["unshare", "-rm", "sh", "-c", shell, "sh"] if may_mount else []
    result = subprocess.run(
        [*wrapper, sys.executable, "-c", PRELUDE + SMALL],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.stdout == "True (300, 40, 131) True\n", result.stderr


LIMITED = """
import resource
from parallelformers_ng.errors import SharedMemoryError
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # of files, memfds among them
try:
    parallelize(model, 2, device='cpu')
except SharedMemoryError as error:
    print(type(error).__name__, right(), all(not tensor.is_meta for tensor in model.state_dict().values()))
"""


@pytest.mark.parametrize("limit", [1 << 12, 64 << 20])
def test_a_memory_limit_is_a_typed_error_and_leaves_the_model_as_it_was(limit):
    """The lower limit stops the arena, the other the weights."""
    model = "" if limit == 1 << 12 else "model.extra = torch.nn.Linear(1 << 13, 1 << 12)\n"
    result = run(["-c", f"{PRELUDE}limit = {limit}\n{model}{LIMITED}"])
    assert result.stdout == "SharedMemoryError True True\n", result.stderr


DRAINED = """
import queue
stopping = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopping.set())  # the server's own
answers = queue.Queue()
def serve():
    while not stopping.is_set():
        answers.put(right())
server = threading.Thread(target=serve)
server.start()
answers.get()
os.kill(os.getpid(), signal.SIGTERM)
server.join()
model.deparallelize()
print(all(list(answers.queue)), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_a_server_drains_on_sigterm_with_a_handler_of_its_own():
    result = run(["-c", PRELUDE + START + DRAINED])
    assert (result.stdout, result.stderr, result.returncode) == ("True True\n", "", 0)
