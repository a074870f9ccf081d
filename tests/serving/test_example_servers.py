"""Tests the example servers in separate processes, with a real port and many concurrent clients."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.saved_model import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
NEW_TOKENS = 4
LONG = 600  # number of tokens whose generation takes a second even on a fast machine
PROMPTS = [f"w{first} w{first * 7 % 130} w{second}" for first in range(1, 26) for second in (3, 44)]

FLASK = [sys.executable, "examples/flask_app.py", "--port", "0"]
FASTAPI = [sys.executable, "examples/fastapi_app.py", "--port", "0"]
GUNICORN = [sys.executable, "-m", "gunicorn", "--pythonpath", "examples", "--bind", "127.0.0.1:0", "--workers", "1"]
GUNICORN += ["--threads", "16", "flask_app:create_app()"]


@dataclass
class Server:
    process: subprocess.Popen
    client: httpx.Client
    log: Path

    def generate(self, text: str, **query: int) -> dict[str, str]:
        answer = self.client.get(f"/generate_text/{text}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def family(self) -> list[psutil.Process]:
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def wait_until_gone(self, family: list[psutil.Process]) -> None:
        self.process.wait(60)
        deadline = time.monotonic() + 60
        while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family):
            assert time.monotonic() < deadline, f"still running: {family}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> dict[str, str]:
    """Return a map from each prompt to the text that one process generates."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts = {}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS)
        texts[prompt] = tokenizer.decode(tokens[0], skip_special_tokens=True)
    return texts


@contextlib.contextmanager
def serving(command: list[str], folder: Path, log: Path, new_tokens: int = NEW_TOKENS) -> Iterator[Server]:
    """Start a server on a free port, and wait until the server answers."""
    environment = {
        **os.environ,
        "MODEL": str(folder),
        "NUM_GPUS": "2",
        "MAX_NEW_TOKENS": str(new_tokens),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = wait_for_text(log, r"http://127\.0\.0\.1:\d+", process)[0]
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            assert client.get("/health").status_code == 200  # gunicorn listens before the model is loaded
            yield Server(process, client, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def check_answers(server: Server, expected: dict[str, str], clients: int, requests: int) -> None:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(requests)]
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(server.generate, prompts))
    assert answers == [{"inputs": prompt, "outputs": expected[prompt]} for prompt in prompts]


@pytest.mark.slow
def test_flask(model_folder: Path, expected: dict[str, str], tmp_path: Path) -> None:
    with serving(FLASK, model_folder, tmp_path / "log") as server:
        family = server.family()
        assert len(family) == 4  # the server, its fork server, and two workers
        check_answers(server, expected, clients=16, requests=200)
        assert server.generate("w1//w2/ w3")["inputs"] == "w1//w2/ w3"
        assert server.client.get("/generate_text/%20").status_code == 400
        server.process.send_signal(signal.SIGTERM)
        server.wait_until_gone(family)
        assert server.process.returncode == 0


@pytest.mark.slow
def test_flask_under_gunicorn(model_folder: Path, expected: dict[str, str], tmp_path: Path) -> None:
    with serving(GUNICORN, model_folder, tmp_path / "log") as server:
        family = server.family()
        assert len(family) == 5  # gunicorn's master and worker, the fork server, and the model's two workers
        check_answers(server, expected, clients=16, requests=32)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until_gone(family)


@pytest.mark.slow
def test_gunicorn_with_preload_ends_at_once(model_folder: Path) -> None:
    environment = {**os.environ, "MODEL": str(model_folder), "NUM_GPUS": "2", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(ROOT)
    command = [*GUNICORN[:-1], "--preload", GUNICORN[-1]]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode != 0
    assert "run gunicorn without --preload" in ended.stderr


@pytest.mark.slow
def test_flask_survives_a_killed_worker_until_sigterm(model_folder: Path, tmp_path: Path) -> None:
    with serving(FLASK, model_folder, tmp_path / "log", new_tokens=LONG) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.client.get, "/generate_text/w1")
        worker = server.family()[2]
        wait_until_busy(worker)
        worker.kill()
        failed = running.result()
        assert (failed.status_code, failed.json()) == (503, {"error": "WorkerDiedError"})

        assert server.client.get("/health").json()["memory_allocated"].keys() == {"cpu:0", "cpu:1"}
        family = server.family()  # the family now contains the new workers
        running = pool.submit(server.generate, "w1")
        wait_until_busy(family[2])
        server.process.send_signal(signal.SIGTERM)
        assert len(running.result()["outputs"].split()) > 100  # the whole text, up to the end token of the model
        server.wait_until_gone(family)


def test_fastapi(model_folder: Path, expected: dict[str, str], tmp_path: Path) -> None:
    with serving(FASTAPI, model_folder, tmp_path / "log") as server:
        family = server.family()
        check_answers(server, expected, clients=16, requests=64)
        assert server.client.get("/generate_text/w1", params={"max_new_tokens": 0}).status_code == 422
        assert server.client.get("/generate_text/%20").status_code == 400
        server.process.send_signal(signal.SIGTERM)
        server.wait_until_gone(family)


@pytest.mark.slow
def test_fastapi_streams(model_folder: Path, tmp_path: Path) -> None:
    with serving(FASTAPI, model_folder, tmp_path / "log", new_tokens=LONG) as server:
        prompt, query = PROMPTS[0], {"max_new_tokens": 40}
        whole = server.generate(prompt, **query)["outputs"]
        family = server.family()

        # A client disconnects after the first piece. The server then stops the request and logs the number of generated
        # tokens, which is below LONG if the first piece arrived before the last token.
        with server.client.stream("GET", f"/stream_text/{prompt}", params={"max_new_tokens": LONG}) as stream:
            first = next(stream.iter_text())
        assert first.strip()
        assert whole.startswith(f"{prompt} {first}")
        stopped = wait_for_text(server.log, rf"client left; stopped after (\d+) of {LONG} tokens", server.process)
        assert 1 <= int(stopped[1]) < LONG

        # Several clients stream concurrently; the server completes running streams after SIGTERM.
        with ThreadPoolExecutor(4) as pool:
            begun = threading.Event()
            texts = [pool.submit(read_stream, server, prompt, query, begun) for _ in range(4)]
            assert begun.wait(60)
            assert {f"{prompt} {future.result()}" for future in texts[:3]} == {whole}
            last = threading.Event()
            text = pool.submit(read_stream, server, prompt, query, last)
            assert last.wait(60)
            server.process.send_signal(signal.SIGTERM)
            assert f"{prompt} {text.result()}" == whole
        server.wait_until_gone(family)


def read_stream(server: Server, prompt: str, query: dict[str, int], begun: threading.Event) -> str:
    """Return the whole text of a stream, and set `begun` at the first piece."""
    text = ""
    with server.client.stream("GET", f"/stream_text/{prompt}", params=query) as stream:
        for piece in stream.iter_text():
            text += piece
            begun.set()
    return text


def wait_until_busy(worker: psutil.Process) -> None:
    """Wait until an idle worker has used some CPU time."""
    before = worker.cpu_times().user
    deadline = time.monotonic() + 120
    while worker.cpu_times().user - before < 0.05:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_text(log: Path, pattern: str, process: subprocess.Popen) -> re.Match[str]:
    deadline = time.monotonic() + 120
    while (match := re.search(pattern, log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return match
