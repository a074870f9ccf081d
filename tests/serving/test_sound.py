"""Tests that transcripts equal transformers' transcripts, and that hostile sound files are refused."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import soxr
import torch
import transformers as tf

from parallelformers_ng import parallelize
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.serving.model_kinds import kind_of
from parallelformers_ng.serving.run import _tokenizer, load, warm_up
from parallelformers_ng.serving.serve_options import ServeOptions
from tests.helpers.server import Running, ScriptedModel, save_served_model, serving, tiny_tokenizer
from tests.helpers.serving_media import save_whisper, sound_file, tone

RATE = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def running(groups: Callable[[int], WorkerGroup], folder: Path) -> Iterator[Running]:
    kind = kind_of(str(folder))
    assert str(kind) == "transcripts of sound"
    processor = _tokenizer(str(folder), None, kind)
    with (
        parallelize(folder, workers=groups(2), dtype="float32", batching=True) as model,
        serving(model, processor, kind, max_audio_seconds=6) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def whole(folder: Path) -> Callable[..., str]:
    """Return a function that transcribes with transformers in one process."""
    processor = tf.WhisperProcessor.from_pretrained(folder)
    model = tf.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def transcribe(samples: np.ndarray, prompt: str | None = None, **arguments: Any) -> str:
        if len(samples) > processor.feature_extractor.n_samples:
            options = {"truncation": False, "padding": "longest", "return_attention_mask": True}
            arguments["return_timestamps"] = True
        else:
            options = {"return_attention_mask": True}
        if prompt is not None:
            arguments["prompt_ids"] = processor.get_prompt_ids(prompt, return_tensors="pt")
        inputs = processor(samples, sampling_rate=RATE, return_tensors="pt", **options)
        return processor.decode(
            model.generate(**inputs, task="transcribe", **arguments)[0], skip_special_tokens=True
        ).strip()

    return transcribe


def ask(running: Running, data: bytes, status: int = 200, name: str = "a.wav", **fields: Any) -> Any:
    with running.client() as client:
        answer = client.post("/v1/audio/transcriptions", files={"file": (name, data)}, data=fields)
    assert answer.status_code == status, answer.text
    return answer.json()["text"] if status == 200 else answer.json()["error"]["message"]


def test_the_text_is_that_of_transformers(running, whole):
    short = tone(1.3)
    requests: list[dict[str, Any]] = [{}, {"language": "de"}, {"language": "EN", "prompt": "Names: Ada"}]
    want = [whole(short), whole(short, language="de"), whole(short, language="en", prompt="Names: Ada")]
    assert [ask(running, sound_file(short), **fields) for fields in requests] == want
    assert len({*want, whole(tone(1.0))}) == 4, "sound, language and prompt have an effect"


def test_sound_beyond_the_models_window_is_read(running, whole):
    samples = tone(5.1)
    assert ask(running, sound_file(samples), language="en") == whole(samples, language="en")


@pytest.mark.parametrize(("kind", "subtype"), [("FLAC", "PCM_24"), ("OGG", None), ("MP3", None), ("WAV", "PCM_16")])
def test_formats(running, whole, kind, subtype):
    data = sound_file(tone(1.5), kind=kind, subtype=subtype)
    decoded, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate == RATE
    assert ask(running, data, name=f"a.{kind.lower()}") == whole(decoded)


def test_other_rates_and_channels(running, whole):
    samples = tone(1.5, 44_100)
    both = np.stack([samples, np.zeros_like(samples)], 1)
    want = whole(soxr.resample(both.mean(1), 44_100, RATE, quality="HQ"))
    assert ask(running, sound_file(both, 44_100)) == want


def test_the_client_of_openai(running, whole):
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
    file = ("a.wav", sound_file(tone(1.3)))
    transcription = client.audio.transcriptions.create(model="tiny", file=file, language="en")
    assert transcription.text == whole(tone(1.3), language="en")
    assert transcription.usage.seconds == 1  # type: ignore[union-attr]
    text = client.audio.transcriptions.create(model="tiny", file=file, language="en", response_format="text")
    assert text == transcription.text + "\n"


def test_a_seed_repeats_a_sampled_answer(running):
    one, again, other = (
        ask(running, sound_file(tone(1.3)), temperature=1.5, seed=seed) for seed in (1, 1, 2)
    )  # fmt: skip
    assert one == again != other


def wave_head(frames: int, rate: int = RATE, channels: int = 1) -> bytes:
    """Return a WAV header with a large length and without samples."""
    size = frames * 2 * channels
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, rate * 2 * channels & 0xFFFFFFFF, 2 * channels, 16)
    return b"RIFF" + struct.pack("<I", min(36 + size, 0xFFFFFFFF)) + b"WAVE" + form + b"data" + struct.pack("<I", size)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"RIFF", "cannot be read"),
        (b"<html>", "cannot be read"),
        (sound_file(tone(6.5)), "longer than 6 s"),
        (sound_file(tone(30), kind="FLAC", subtype=None), "longer than 6 s"),
        (sound_file(tone(30), kind="MP3", subtype=None), "longer than 6 s"),
        (sound_file(tone(0.0)), "no sound"),
        (sound_file(np.full(16000, np.nan, "float32")), "not a number"),
        (sound_file(tone(1, 500), 500), "1000 to 192000 Hz"),
        (sound_file(np.zeros((1000, 9), "float32")), "9 channels"),
        (wave_head(1 << 30), "no sound"),  # libsndfile uses the number of bytes present
    ],
    ids=lambda value: "file" if isinstance(value, bytes) else value,  # bytes may contain a time, which changes the id
)
def test_invalid_sound_is_refused(running, data, message):
    assert message in ask(running, data, status=400)


def test_a_long_file_is_not_decoded(running, monkeypatch):
    monkeypatch.setattr("soundfile.SoundFile.read", lambda *_, **__: pytest.fail("the sound was decoded"))
    assert "longer than 6 s" in ask(running, sound_file(tone(6.5)), status=400)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"language": "fr"}, "language is 'fr'; the model knows de, en"),
        ({"response_format": "srt"}, "response_format"),
        ({"temperature": "-1"}, "temperature"),
        ({"stream": "true"}, "stream"),
        ({"timestamp_granularities[]": "word"}, "is not supported"),
        ({"prompt": "<|startoftranscript|>"}, "the tokenizer cannot read the prompt"),
        ({"model": "other"}, "the server has no model 'other'"),
    ],
)
def test_fields_that_do_not_act_are_refused(running, fields, message):
    status = 404 if "model" in fields else 400
    assert message in ask(running, sound_file(tone(1)), status=status, **fields)


def test_bodies_that_are_no_forms_are_refused(running):
    with running.client() as client:
        for body in ({"json": {"file": "a"}}, {"content": b"--x"}, {"data": {"file": "a"}}, {"files": {"sound": b"a"}}):
            answer = client.post("/v1/audio/transcriptions", **body)
            assert answer.status_code == 400, answer.text
        head = {"Content-Type": "multipart/form-data; boundary=x"}
        assert client.post("/v1/audio/transcriptions", content=b"--y\r\n", headers=head).status_code == 400
        many = {f"field{number}": "x" for number in range(100)}
        assert client.post("/v1/audio/transcriptions", data=many, files={"file": b"a"}).status_code == 400


def test_forms_of_other_pages_are_refused(running):
    data = sound_file(tone(1))
    with running.client() as client:
        for origin, status in (("https://evil.test", 403), ("null", 403), (running.url, 200)):
            form = {"files": {"file": data}, "headers": {"Origin": origin}}
            assert client.post("/v1/audio/transcriptions", **form).status_code == status


def test_unsupported_formats_and_models_are_refused(running):
    with running.client() as client:
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [{"role": "user"}]})):
            assert client.post(f"/v1/{path}", json=body).status_code == 400
        assert client.get("/status").json()["generates"] is False
    tokenizer = tiny_tokenizer()
    with serving(ScriptedModel(tokenizer), tokenizer) as other:
        assert "does not transcribe sound" in ask(other, sound_file(tone(1)), status=400)


def test_command_loads_model_with_its_processor(folder, tmp_path):
    options = ServeOptions(str(folder), 2, device="cpu", dtype="float32")
    model, processor = load(options, kind_of(options.model))
    with model:
        assert isinstance(processor, tf.WhisperProcessor)
        warm_up(model)
    save_served_model(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match="the server cannot serve"):
        load(ServeOptions(str(tmp_path), 2, device="cpu"), kind_of(str(tmp_path)))
