"""Tests faults that need separate processes: interrupts, forks, a killed parent, the end of the interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.patience import PROMPTLY, RESTART_SECONDS, workers_of
from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import os, signal, sys, threading, time
import torch
torch.set_num_threads(1)
from parallelformers_ng import parallelize
from parallelformers_ng.model.parallelized import deployment_of
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2
inputs = text_inputs()
model = gpt2()
want = model.generate(**inputs, max_new_tokens=8, do_sample=False)
def right(): return torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), want)
"""
START = "parallelize(model, 2, workers={'device': 'cpu'})\n"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", **more}


def run(arguments: list[str], text: str | None = None, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], input=text, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def await_workers(parent: int, count: int) -> None:
    end = time.monotonic() + RESTART_SECONDS  # a start imports torch and transformers
    while len(workers := workers_of(parent)) != count:
        assert time.monotonic() < end, workers
        time.sleep(0.02)


SERVER = """
import queue
from parallelformers_ng.errors import GroupClosedError
def too_late():
    try: right()
    except GroupClosedError as error: print("shutting down" in str(error))
parallelize(model, 2, workers={"device": "cpu"})
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
print(all(list(answers.queue)), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
STARTED_IN_A_THREAD = """
thread = threading.Thread(target=parallelize, args=(model, 2), kwargs={"workers": {"device": "cpu"}})
thread.start()
thread.join()
print(right(), flush=True)
os.kill(deployment_of(model).pids[1], signal.SIGKILL)
time.sleep(0.2)
"""
IN_FLIGHT = (
    START
    + """
print(right(), flush=True)
threading.Thread(target=lambda: [right() for _ in range(10**6)], daemon=True).start()
time.sleep(0.2)
"""
)


def test_draining_script_ends_quietly_on_sigterm(tmp_path):
    """The script has its own signal handler and does not call `deparallelize`; later calls of the model raise an
    error."""
    # The function registered first runs last, after the workers have ended.
    (tmp_path / "script.py").write_text(f"import atexit\natexit.register(lambda: too_late())\n{PRELUDE}{SERVER}")
    result = run([str(tmp_path / "script.py")])
    assert (result.stdout, result.stderr, result.returncode) == ("True True\nTrue\n", "", 0)


def test_command_after_worker_death_ends_quietly():
    """In this script, the thread that parallelized the model has ended. Only the line about the death is printed."""
    result = run(["-c", PRELUDE + STARTED_IN_A_THREAD])
    assert (result.stdout, result.returncode) == ("True\n", 0)
    assert re.fullmatch(r"(the worker of rank 1 .* died: signal 9; .*\n)?", result.stderr)


def test_script_with_running_daemon_request_ends_quietly():
    result = run(["-"], PRELUDE + IN_FLIGHT)
    assert (result.stdout, result.stderr, result.returncode) == ("True\n", "", 0)


KILLED = {
    "start": "print('now', flush=True)\n" + START,
    "hand-over": (
        "from parallelformers_ng.model import deployment\n"
        "hand_over = deployment.hand_over\n"
        "def slowly(*args): print('now', flush=True); hand_over(*args); time.sleep(60)\n"
        "deployment.hand_over = slowly\n" + START
    ),
    "request": (
        "parallelize(model, 2, workers={'device': 'cpu', 'backend': 'gloo'})\n"
        "print('now', flush=True)\nwhile True: right()\n"
    ),
}


def test_nothing_outlives_killed_parents(tmp_path):
    shared = set(os.listdir("/dev/shm"))
    parents = [
        subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script],
            env=environment(TMPDIR=str(tmp_path)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for script in KILLED.values()
    ]
    for parent in parents:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "now\n"
        await_workers(parent.pid, 3)  # two ranks and their fork server
        time.sleep(0.2)
        parent.kill()
        parent.wait()
        parent.stdout.close()
        await_workers(parent.pid, 0)
    assert set(os.listdir("/dev/shm")) <= shared
    assert os.listdir(tmp_path) == []


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal(environment()) as terminal:
        yield terminal


def test_ctrl_c_in_repl_keeps_the_model_working(terminal, tmp_path):
    (tmp_path / "prelude.py").write_text(PRELUDE)
    terminal.read_until(">>> ", 60)
    terminal.type(f"exec(open({str(tmp_path / 'prelude.py')!r}).read())\n")
    terminal.read_until("\n>>> ", 90)
    terminal.type("_ = " + START)
    terminal.read_until("\n>>> ", 120)
    terminal.type("pids = deployment_of(model).pids; long = dict(max_new_tokens=50, do_sample=False)\n")
    terminal.read_until("\n>>> ", PROMPTLY)
    for delay in (0.05, 0.2, 0.4):
        terminal.type("while True: out = model.generate(inputs['input_ids'], **long)\n\n")
        terminal.read_until(r"\.\.\. ", PROMPTLY)
        time.sleep(delay)
        terminal.type("\x03")
        assert "KeyboardInterrupt" in terminal.read_until("\n>>> ", PROMPTLY)
        terminal.type("print('next', right(), deployment_of(model).pids == pids)\n")
        assert "next True True" in terminal.read_until("next (True|False) .*\n>>> ", 60)


class Interpreter:
    """A process in which scripts run one after another, since import and start take most of the time."""

    def __init__(self, log: Path) -> None:
        self.log = log
        # In a mount namespace with a /dev/shm of 1 MB, if the system allows one.
        may_mount = subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
        shell = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
        wrapper = ["unshare", "-rm", "sh", "-c", shell, "sh"] if may_mount else []
        driver = "for line in sys.stdin:\n    exec(eval(line), globals())\n    print('done', flush=True)\n"
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, "-c", f"{PRELUDE}\n{driver}"],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def run(self, script: str) -> list[str]:
        """Return the lines that a script prints."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{script!r}\n")
        self.process.stdin.flush()
        lines = []
        for line in self.process.stdout:
            if line == "done\n":
                return lines
            lines.append(line.rstrip())
        raise AssertionError(f"the interpreter ended after {lines}; it wrote: {self.log.read_text()}")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    interpreter = Interpreter(tmp_path_factory.mktemp("interpreter") / "errors")
    yield interpreter
    interpreter.close()


SMALL = """
before = os.listdir("/dev/shm")
big = torch.ones(1, 40, 48).repeat(300, 1, 1)
parallelize(model, 2, workers={'device': 'cpu'})
print(right(), tuple(model(inputs_embeds=big).logits.shape), os.listdir("/dev/shm") == before)
"""
FORKED = """
import multiprocessing
from parallelformers_ng.errors import ParallelError, WrongProcessError
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
child = multiprocessing.get_context("fork").Process(target=lambda: print(list(tries()), flush=True))
child.start()
child.join()
try:
    multiprocessing.get_context("spawn").Process(target=print, args=(model,)).start()
except ParallelError as error:
    print("pickling" in str(error))
print(right())
model.deparallelize()
print(right())
"""


def test_tiny_shared_memory_and_forks_are_handled(interpreter):
    """The forks leave the parent's model working."""
    assert interpreter.run(SMALL) == ["True (300, 40, 131) True"]
    assert interpreter.run(FORKED) == ["[True, True, True, True]", "[True, True, True, True]", "True", "True", "True"]


LIMITED = """
import resource
from parallelformers_ng.errors import SharedMemoryError
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))  # of files, memfds among them
model = gpt2()
if limit > 1 << 20: model.extra = torch.nn.Linear(1 << 13, 1 << 12)
try:
    parallelize(model, 2, workers={'device': 'cpu'})
except SharedMemoryError as error:
    print(type(error).__name__, right(), all(not tensor.is_meta for tensor in model.state_dict().values()))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.mark.parametrize("limit", [1 << 12, 64 << 20])
def test_memory_limit_raises_and_leaves_the_model(interpreter, limit):
    """The lower limit stops the arena, the higher one the weights."""
    assert interpreter.run(f"limit = {limit}\n{LIMITED}") == ["SharedMemoryError True True"]
