"""Answers `/v1/audio/transcriptions` with the transcript of sound, from models such as Whisper."""

from __future__ import annotations

import asyncio
import io
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import Request
from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse, PlainTextResponse, Response

from parallelformers_ng.serving.api_errors import ApiError, bad_request, refusing
from parallelformers_ng.serving.engine import Engine, seed_of
from parallelformers_ng.serving.structured import Fields

_MAX_FIELDS = 32
_REFUSED = ("timestamp_granularities", "timestamp_granularities[]", "include", "include[]", "known_speaker_names[]")
_MAX_RATE = 192_000
_MAX_CHANNELS = 8
_UNKNOWN = (1 << 63) - 1  # libsndfile's number of frames if the header has no length, as in a recorded stream
_BLOCK = 1 << 16  # number of frames to decode at a time, so that a file that is too long is noticed early


class TranscriptionRequest(Fields):
    """Form fields of a transcription request, except the file."""

    model: str | None = None
    language: Annotated[str, Field(max_length=32)] | None = None  # None: the model detects the language
    prompt: Annotated[str, Field(max_length=4096)] | None = None  # Whisper follows its names and spelling
    response_format: Literal["json", "text"] = "json"
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0  # 0 uses the model's settings and no seed
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stream: Literal["false", "False", "0", ""] = "false"


class Transcription:
    """Handler of requests for transcripts."""

    def __init__(self, engine: Engine, processor: Any) -> None:
        self._engine = engine
        self._processor = processor
        self._turn = asyncio.Lock()  # decode one sound file at a time, because decoded sound takes much memory

    async def answer(self, request: Request) -> Response:
        """Transcribe sound. The form fields are `file`, `language`, `prompt`, `response_format` and `temperature`."""
        if self._processor is None:
            raise bad_request("the model does not transcribe sound; see GET /docs for other routes", "model")
        # Check the origin here, because browsers send forms (not JSON) to other origins without a CORS preflight.
        origin, host = request.headers.get("origin"), request.headers.get("host")
        if origin and origin.partition("://")[2] != host and not {origin, "*"} & set(self._engine.options.cors):
            message = f"the server refuses forms from pages of {origin}; start the server with --cors {origin}"
            raise ApiError(403, message, code="origin")
        async with request.form(max_files=1, max_fields=_MAX_FIELDS) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise bad_request("the form has no file", "file")
            for name in _REFUSED:
                if name in form:
                    raise bad_request(f"{name} is not supported; remove the field", name, "unsupported_parameter")
            fields = TranscriptionRequest.model_validate({k: v for k, v in form.items() if k != "file"})
            self._engine.named(fields.model)
            arguments = self._arguments(fields)
            with self._engine.admitted(1):
                async with self._turn:
                    inputs, seconds = await asyncio.to_thread(self._inputs, await file.read())
                output = await self._engine.model.agenerate(**inputs, **arguments)
        text = self._processor.tokenizer.decode(output[0], skip_special_tokens=True).strip()
        if fields.response_format == "text":
            return PlainTextResponse(text + "\n")
        return JSONResponse({"text": text, "usage": {"type": "duration", "seconds": round(seconds)}})

    def _arguments(self, request: TranscriptionRequest) -> dict[str, Any]:
        config = self._engine.model.generation_config
        arguments: dict[str, Any] = {"timeout": self._engine.options.timeout}
        if getattr(config, "is_multilingual", False):
            arguments["task"] = "transcribe"
        if request.language:
            known = getattr(config, "lang_to_id", None) or {}
            if f"<|{request.language.lower()}|>" not in known:
                codes = ", ".join(sorted(mark.strip("<|>") for mark in known))
                message = f"language is {request.language!r}; the model knows {codes or 'only one; remove the field'}"
                raise bad_request(message, "language")
            arguments["language"] = request.language.lower()
        if request.prompt:
            with refusing((ValueError,), "the tokenizer cannot read the prompt", "prompt"):
                arguments["prompt_ids"] = self._processor.get_prompt_ids(request.prompt, return_tensors="pt")
        if request.temperature:
            arguments |= {"temperature": request.temperature, "seed": seed_of(request.seed)}
        return arguments

    def _inputs(self, data: bytes) -> tuple[dict[str, Any], float]:
        """Return the model inputs for a sound file, and the length of the sound in seconds."""
        extractor = self._processor.feature_extractor
        rate = extractor.sampling_rate
        samples = read_sound(data, rate, self._engine.options.max_audio_seconds)
        # Do not truncate sound that is longer than the model's window: `generate` splits such sound at timestamps.
        is_long = len(samples) > extractor.n_samples
        whole = {"truncation": False, "padding": "longest"} if is_long else {}
        features = extractor(samples, sampling_rate=rate, return_tensors="pt", return_attention_mask=True, **whole)
        dtype: torch.dtype = self._engine.model.dtype
        inputs = {"input_features": features["input_features"].to(dtype), "attention_mask": features["attention_mask"]}
        return inputs | ({"return_timestamps": True} if is_long else {}), len(samples) / rate


class _Named(io.BytesIO):
    def __repr__(self) -> str:  # soundfile's error messages contain the repr of the file
        return "it"


def read_sound(data: bytes, rate: int, max_seconds: float) -> Any:
    """Decode a sound file with libsndfile to one channel at `rate` Hz: numpy array float32 `[samples]`.

    Several channels are averaged. The length is checked before the decoding, by the header, and again while decoding,
    because a header can be wrong.
    """
    import soundfile
    import soxr

    unreadable = refusing((soundfile.SoundFileError,), "the sound file cannot be read", "file")
    with unreadable, soundfile.SoundFile(_Named(data)) as file:
        if not 1000 <= file.samplerate <= _MAX_RATE or file.channels > _MAX_CHANNELS:
            limits = f"{_MAX_CHANNELS} channels at 1000 to {_MAX_RATE} Hz"
            why = f"the file has {file.channels} channels at {file.samplerate} Hz; send at most {limits}"
            raise bad_request(why, "file")
        max_frames = int(max_seconds * file.samplerate)
        too_long = bad_request(f"the file is longer than {max_seconds:g} s (--max-audio-seconds)", "file")
        if max_frames < file.frames < _UNKNOWN:
            raise too_long
        parts, frames = [], 0
        while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
            frames += len(block)
            if frames > max_frames:
                raise too_long
            parts.append(block.mean(1))
        file_rate = file.samplerate
    if not parts:
        raise bad_request("the file has no sound", "file")
    samples = np.concatenate(parts)
    if not np.isfinite(samples).all():
        raise bad_request("the file has samples that are infinite or not a number", "file")
    return samples if file_rate == rate else soxr.resample(samples, file_rate, rate, quality="HQ")
