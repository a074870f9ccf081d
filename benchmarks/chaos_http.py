"""Tests a server of `parallelformers-ng serve` with hostile clients, and with clients that disconnect."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.chaos_figures import Figure
from benchmarks.chaos_http_media import picture_request, sound_request
from benchmarks.chaos_http_requests import request
from tests.helpers.server import save_served_model
from tests.helpers.serving_media import save_llava, save_whisper, sound_file, tone

SECONDS = 120.0  # limit for an answer
ALLOWED = {"closed", "503", *map(str, range(400, 500))}
HONEST = {"prompt": "An honest question", "max_tokens": 8, "temperature": 0}


class Served:
    """A server of a tiny model in its own process.

    Attributes:
        calm: number of honest requests that are timed before the hostile requests.
        wanted: right text of the answer to the honest request.
    """

    calm = 1000

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=SECONDS,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )
        self.wanted = self.ask_honestly()

    def ask(self, body: dict[str, Any]) -> str:
        """Return the text of a completion; if the request fails, return "error: " and the name of the error."""
        try:
            answer = self.client.post("/v1/completions", json=body)
        except httpx.TransportError as error:
            return f"error: lost, {type(error).__name__}"
        body_json = answer.json()
        return body_json["choices"][0]["text"] if answer.status_code == 200 else f"error: {body_json['error']['code']}"

    def ask_honestly(self) -> str:
        """Send the honest request, and return the text of its answer."""
        return self.ask(HONEST)

    @property
    def family(self) -> list[psutil.Process]:
        """Processes of the server: the server itself, its fork server, and the workers."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    @property
    def workers(self) -> list[psutil.Process]:
        return [process for process in self.family[1:] if process.children() == []]

    @property
    def megabytes(self) -> float:
        """Anonymous and shared memory of all processes in megabytes; a page that processes share counts once."""
        rollups = [Path(f"/proc/{process.pid}/smaps_rollup").read_text() for process in self.family]
        counted = re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB$", "".join(rollups), flags=re.MULTILINE)
        return sum(map(int, counted)) / 1e3

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"vllm:{name}{{")).rsplit(" ", 1)[1])

    def settle(self) -> float:
        """Wait until no request is running or waiting, and return the seconds of the wait."""
        begun = time.monotonic()
        while self.metric("num_requests_running") or self.metric("num_requests_waiting"):
            assert time.monotonic() < begun + SECONDS, "requests are still running or waiting"
            time.sleep(0.002)
        return time.monotonic() - begun


class Transcriber(Served):
    """A server of a tiny Whisper model. The server answers one request after another."""

    calm = 50

    def ask_honestly(self) -> str:
        form: dict[str, Any] = {"files": {"file": sound_file(tone(0.5), subtype="PCM_16")}, "data": {"language": "en"}}
        return str(self.client.post("/v1/audio/transcriptions", **form).json()["text"])


@contextlib.contextmanager
def served(
    *flags: str, save: Callable[[Path], Path] = save_served_model, kind: type[Served] = Served
) -> Iterator[Served]:
    """Save a model, start a server of the model, and end the server after the block."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        save(Path(folder))
        command = [sys.executable, "-m", "parallelformers_ng", "serve", folder, "--num-gpus", "2", "--device", "cpu"]
        command += ["--port", str(port), "--served-model-name", "tiny", *flags]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            try:
                for line in process.stderr:
                    if "serving tiny" in line:
                        break
                threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                    _until(lambda: _is_ready(client))
                yield kind(process, port)
            finally:
                process.terminate()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def _until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 2 * SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def hostile(count: int, seed: int) -> list[Figure]:
    """Send hostile requests, some with pictures, to a vision-language model."""
    return _hostile(count, seed, any_request, "--max-tokens", "4", save=save_llava)


def hostile_sound(count: int, seed: int) -> list[Figure]:
    """Send hostile forms to a model that transcribes sound."""
    limit = (
        "--max-audio-seconds",
        "2",
    )  # a random model hardly advances its timestamps, so longer sound would take minutes
    return _hostile(count, seed, sound_request, *limit, save=save_whisper, kind=Transcriber)


def any_request(source: random.Random) -> bytes:
    """Return a hostile request with text, a picture or sound."""
    return source.choices((request, picture_request, sound_request), (8, 2, 1))[0](source)


def _hostile(count: int, seed: int, make: Callable[[random.Random], bytes], *flags: str, **what: Any) -> list[Figure]:
    """Send hostile requests from 8 clients, while 2 clients send honest requests.

    The hostile clients run in their own process, which uses the processor only if no other process needs it. In
    practice, hostile clients are on another machine.
    """
    context = multiprocessing.get_context("spawn")
    with (
        served("--client-timeout", "5", *flags, **what) as server,
        ProcessPoolExecutor(1, context, _run_when_idle) as clients,
        ThreadPoolExecutor(2) as pool,
    ):
        calm = [pool.submit(_honest, server, lambda number: number < server.calm) for _ in range(2)]
        calm_times = [each for future in calm for each in future.result()[0]]
        clients.submit(send_from_many, server.port, f"{seed} first", max(50, count // 20), make).result()
        workers, before = (
            [process.pid for process in server.workers],
            server.megabytes,
        )  # after the first requests, so that one-time memory does not count
        over = threading.Event()
        honest = [pool.submit(_honest, server, lambda _: not over.is_set()) for _ in range(2)]
        outcomes = clients.submit(send_from_many, server.port, str(seed), count, make).result()
        over.set()
        times = [each for future in honest for each in future.result()[0]]
        wrong = sum(future.result()[1] for future in honest)
        server.settle()
        grown = server.megabytes - before
        died = workers != [process.pid for process in server.workers]
    print(f"  outcomes {dict(sorted(outcomes.items()))}, {len(times)} honest requests", flush=True)
    harmless = outcomes.pop("200", 0)
    return [
        Figure("answers other than 4xx and 503", "sum", 0, [sum(outcomes[each] for each in outcomes.keys() - ALLOWED)]),
        Figure("share that was taken after all", "max", 0.5, [harmless / count]),
        Figure("wrong honest answers", "sum", 0, [wrong]),
        Figure("honest p99 against that in calm, ratio", "max", 2, [_p99(times) / _p99(calm_times)]),
        Figure("more anonymous and shared memory, MB", "max", 50, [grown]),
        Figure("restarts", "sum", 0, [int(died)]),
    ]


def _run_when_idle() -> None:
    """Give this process the processor only if no other process needs the processor.

    A process with only a high nice value would delay ranks that wait for each other by some milliseconds.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def clients(count: int, seed: int) -> list[Figure]:
    """Disconnect 20 clients at random moments of their answers, and check the answer of one more client."""
    source, freed, wrong = random.Random(seed), list[float](), 0
    with served("--waiting", "256") as server:
        for _ in range(max(1, count // 20)):
            with ThreadPoolExecutor(20) as pool:
                moments = [source.uniform(0, 0.5) for _ in range(20)]
                gone = [pool.submit(_go, server.port, moment, source.random() < 0.5) for moment in moments]
                wrong += server.ask(HONEST) != server.wanted
                for future in gone:
                    future.result()
            freed.append(server.settle())
        running = server.client.get("/status").json()["running"]
    return [
        Figure("last one gone to all rows free, max, s", "max", 1, freed),
        Figure("wrong answers", "sum", 0, [wrong]),
        Figure("rows that stayed", "sum", 0, [running]),
    ]


def kills(count: int, seed: int) -> list[Figure]:
    """Kill a worker under load, `count` times; then send SIGTERM to the server during 8 requests."""
    source, outcomes = random.Random(seed), Counter[str]()
    with served() as server:
        for _ in range(count):
            with ThreadPoolExecutor(8) as pool:
                pending = [pool.submit(_outcome, server, 200) for _ in range(8)]
                time.sleep(source.uniform(0.05, 0.5))
                source.choice(server.workers).kill()
                outcomes.update(future.result() for future in pending)
            _until(lambda: _is_ready(server.client))
            outcomes[_outcome(server, 8)] += 1
            time.sleep(20)  # keep the number of deaths in a minute below the limit, see max_restarts
        with ThreadPoolExecutor(8) as pool:
            pending = [pool.submit(_outcome, server, 400) for _ in range(8)]
            _until(lambda: server.metric("num_requests_running") == 8)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
            begun = time.monotonic()
            refused = server.client.post("/v1/completions", json=HONEST).status_code
            after = time.monotonic() - begun
            complete = sum(future.result() == "right" for future in pending)
        status = server.process.wait(SECONDS)
    print(f"  outcomes {dict(outcomes)}", flush=True)
    return [
        Figure("wrong answers", "sum", 0, [outcomes["wrong"]]),
        Figure("hung, or without a type", "sum", 0, [sum(outcomes.values()) - outcomes["right"] - outcomes["typed"]]),
        Figure("of 8 in flight at SIGTERM incomplete", "sum", 0, [8 - complete]),
        Figure("new ones not refused with 503", "sum", 0, [int(refused != 503)]),
        Figure("SIGTERM to a refusal, s", "max", 0.5, [after]),
        Figure("exit status", "sum", 0, [status]),
    ]


def _outcome(server: Served, tokens: int) -> str:
    reply = server.ask({**HONEST, "max_tokens": tokens})
    if reply.startswith("error: "):
        return "lost" if "lost" in reply else "typed" if reply != "error: None" else "untyped"
    return "right" if reply.startswith(server.wanted) else "wrong"


def _honest(server: Served, go_on: Callable[[int], bool]) -> tuple[list[float], int]:
    """Send honest requests; return the seconds of each request, and the number of wrong answers."""
    times, wrong = list[float](), 0
    while go_on(len(times)):
        begun = time.monotonic()
        wrong += server.ask_honestly() != server.wanted
        times.append(time.monotonic() - begun)
    return times, wrong


def _p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


def send_from_many(port: int, seed: str, count: int, make: Callable[[random.Random], bytes]) -> Counter[str]:
    """Run `send_hostile` in 8 threads at once, and return the sum of the counts."""
    with ThreadPoolExecutor(8) as pool:
        pending = [
            pool.submit(send_hostile, port, random.Random(f"{seed} {number}"), share, make)
            for number, share in enumerate(_shares(count, 8))
        ]
        return sum((future.result() for future in pending), Counter())


def send_hostile(
    port: int, source: random.Random, count: int, make: Callable[[random.Random], bytes] = request
) -> Counter[str]:
    """Send hostile requests, one after another, and count the outcomes.

    Args:
        make: function that returns the bytes of one request.

    Returns:
        The number of each outcome: an HTTP status, "closed", "hung" or "no HTTP".
    """
    return Counter(_send(port, make(source), source.random() < 0.1) for _ in range(count))


def _send(port: int, data: bytes, goes: bool) -> str:
    """Send bytes, and return the outcome. If `goes`, disconnect before the answer."""
    with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        try:
            connection.sendall(data)
            if goes:
                return "closed"
            reply = connection.recv(1 << 16)
        except TimeoutError:
            return "hung"
        except OSError:
            return "closed"
    if not reply:
        return "closed"
    return reply[9:12].decode(errors="replace") if reply.startswith(b"HTTP/1.1 ") else "no HTTP"


def _shares(count: int, among: int) -> list[int]:
    return [count // among + (number < count % among) for number in range(among)]


def _go(port: int, seconds: float, stream: bool) -> None:
    with contextlib.suppress(httpx.TimeoutException), httpx.Client(trust_env=False) as client:
        body = {**HONEST, "max_tokens": 500, "stream": stream}
        limit = httpx.Timeout(SECONDS, read=seconds)
        with client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=limit) as answer:
            end = time.monotonic() + seconds
            for _ in answer.iter_raw():
                if time.monotonic() > end:
                    return
