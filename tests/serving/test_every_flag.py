"""Tests that each flag of `serve` is started as a command, or refused in words before the model loads."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import httpx
import pytest

from parallelformers_ng.cli import serve
from tests.helpers.ended_commands import ended
from tests.helpers.server import save_served_model
from tests.helpers.serving_media import data_url, picture, save_llava, save_whisper, sound_file, tone
from tests.serving.test_command import command
from tests.serving.test_started_features import LAYOUTS, started_flags

_LIMITS = (
    "--host localhost --api-key key --open-probes --max-top-logprobs 1 --max-body-bytes 4000 --rows 2 --waiting 2"
    " --timeout 50 --client-timeout 1 --drain 1 --prefill-patience 100 --no-access-log --log-level debug"
)
_PICTURES = "--media-folder {media} --max-pictures 1 --max-pixels 2000"
_SOUND = "--max-audio-seconds 1"
_INPUTS = "--max-inputs 1"
_ELSEWHERE = {
    "--config": "test_server_completes_running_requests_after_sigterm",
    "--revision": "test_a_revision_is_for_models_of_the_hub",
    "--tensor": "tests/cli and _WRONG: a machine with two ranks has no stages of two",
    **dict.fromkeys(("--launcher", "--ray-address", "--autoscaling"), "tests/hosts/test_ray.py, with a Ray cluster"),
}
"""Flags that this module does not start, and the tests that do."""


def _flags_of_parser() -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    serve.add_flags(parser)
    actions = [each for each in parser._actions if each.help is not argparse.SUPPRESS]
    return {flag for action in actions for flag in action.option_strings}


def test_each_flag_has_a_test():
    """A new flag needs a value that a started command acts on, here or in test_started_features."""
    lines = [*started_flags(Path()), *LAYOUTS, _LIMITS, _PICTURES, _SOUND, _INPUTS, "--port --device --num-gpus"]
    started = {word for line in lines for word in line.split() if word.startswith("--")}
    assert started | _ELSEWHERE.keys() == _flags_of_parser()


def test_numbers_are_checked_before_torch_is_imported(tmp_path: Path):
    """A flag with a number refuses a word; `_WRONG` of test_command has the other wrong values."""
    parser = argparse.ArgumentParser(add_help=False)
    serve.add_flags(parser)
    flags = [each.option_strings[0] for each in parser._actions if each.type in (int, float)]
    results = ended([["serve", "model", flag, "many"] for flag in flags], tmp_path)
    for flag, (status, text, has_torch) in zip(flags, results, strict=True):
        assert (status, has_torch) == (2, False), flag
        assert f"argument {flag}: invalid" in text or f"{flag}: invalid" in text, text


def _status(client: httpx.Client, path: str, **body: object) -> int:
    return client.post(path, json=body).status_code


@pytest.mark.slow
def test_limits_act(tmp_path: Path):
    folder = save_served_model(tmp_path / "model")
    with command(folder, *_LIMITS.split()) as (process, client, line):
        assert "localhost" in line or "127.0.0.1" in line
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer key"
        prompt = {"prompt": "x", "max_tokens": 1}
        assert _status(client, "/v1/completions", **prompt, logprobs=1) == 200
        assert _status(client, "/v1/completions", **prompt, logprobs=2) == 400
        assert _status(client, "/v1/completions", prompt="x" * 5000, max_tokens=1) == 413
        assert _status(client, "/v1/completions", prompt=["x"] * 5, max_tokens=1) == 503
        process.terminate()
        begin = time.monotonic()
        process.wait(30)
        assert time.monotonic() - begin < 25
        assert process.stderr is not None
        assert "/v1/completions" not in "".join(line for line in process.stderr if "POST" in line and "200" in line)


@pytest.mark.slow
def test_limits_of_pictures_act(tmp_path: Path):
    folder, media = save_llava(tmp_path / "model"), tmp_path / "media"
    media.mkdir()
    picture().save(media / "small.png")

    def status(*addresses: str) -> int:
        parts = [{"type": "image_url", "image_url": {"url": address}} for address in addresses]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
        return _status(client, "/v1/chat/completions", messages=messages, max_tokens=1)

    with command(folder, *_PICTURES.format(media=media).split()) as (_, client, _):
        assert status(f"file://{media}/small.png") == 200
        assert status(f"file://{folder}/config.json") == 400
        assert status(data_url(picture())) == 200
        assert status(*[data_url(picture())] * 2) == 400
        assert status(data_url(picture(100, 100))) == 400


@pytest.mark.slow
def test_limit_of_sound_acts(tmp_path: Path):
    with command(save_whisper(tmp_path / "model"), *_SOUND.split()) as (_, client, _):
        for seconds, status in ((0.8, 200), (1.5, 400)):
            files = {"file": ("a.wav", sound_file(tone(seconds)))}
            assert client.post("/v1/audio/transcriptions", files=files).status_code == status


@pytest.mark.slow
def test_limit_of_inputs_acts(tmp_path: Path):
    with command(save_served_model(tmp_path / "model"), *_INPUTS.split()) as (_, client, _):
        assert _status(client, "/v1/embeddings", input="x") in (200, 400)
        answer = client.post("/v1/embeddings", json={"input": ["x", "y"]})
        assert answer.status_code == 400, answer.text
