"""`/v1/audio/transcriptions`: text of sound, by models such as Whisper."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import torch
from fastapi import Request
from pydantic import Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse, PlainTextResponse, Response

from parallelformers_ng.serving.api_errors import ApiError, bad_request
from parallelformers_ng.serving.engine import Engine, draw_seed
from parallelformers_ng.serving.models import Models
from parallelformers_ng.serving.serve_options import ServeOptions
from parallelformers_ng.serving.sound import read_sound
from parallelformers_ng.serving.structured import Fields

_MOST_FIELDS = 32
_REFUSED = ("timestamp_granularities", "timestamp_granularities[]", "include", "include[]", "known_speaker_names[]")


class TranscriptionRequest(Fields):
    """The fields of the form, but for the file."""

    model: str | None = None
    language: Annotated[str, Field(max_length=32)] | None = None
    prompt: Annotated[str, Field(max_length=4096)] | None = None
    response_format: Literal["json", "text"] = "json"
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stream: Literal["false", "False", "0", ""] = "false"


class Transcription:
    """Answers requests for the text of sound, one after another.

    Args:
        engine: the model.
        processor: the model's; None if it transcribes nothing.
        options: the limits.
    """

    def __init__(self, engine: Engine, processor: Any, options: ServeOptions) -> None:
        self._engine = engine
        self._processor = processor
        self._options = options
        self._turn = asyncio.Lock()  # the memory is that of one request's sound

    async def answer(self, request: Request, models: Models) -> Response:
        """Answer a form.

        Args:
            request: the form, in a body that is read already.
            models: the names that it may ask for.
        """
        if self._processor is None:
            raise bad_request("the model reads no sound; see GET /v1/models", "model")
        self._check_origin(request)
        async with request.form(max_files=1, max_fields=_MOST_FIELDS) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise bad_request("the form has no file", "file")
            for name in _REFUSED:
                if name in form:
                    raise bad_request(f"{name} does not act here; leave it out", name, "unsupported_parameter")
            try:
                fields = TranscriptionRequest.model_validate({k: v for k, v in form.items() if k != "file"})
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise bad_request(f"{where}: {first['msg']}", where) from None
            models.named(fields.model)
            arguments = self._arguments(fields)
            with self._engine.counted():
                async with self._turn:
                    inputs, seconds = await asyncio.to_thread(self._inputs, await file.read())
                output = await self._engine.model.agenerate(**inputs, **arguments)
        text = self._processor.tokenizer.decode(output[0], skip_special_tokens=True).strip()
        if fields.response_format == "text":
            return PlainTextResponse(text + "\n")
        return JSONResponse({"text": text, "usage": {"type": "duration", "seconds": round(seconds)}})

    def _check_origin(self, request: Request) -> None:
        """Refuse forms of other origins' pages: browsers send these without asking, unlike JSON."""
        origin, host = request.headers.get("origin"), request.headers.get("host")
        if origin and origin.partition("://")[2] != host and not {origin, "*"} & set(self._options.cors):
            raise ApiError(403, f"a page of {origin} sends forms only if --cors names it", code="origin")

    def _arguments(self, request: TranscriptionRequest) -> dict[str, Any]:
        """Return arguments of `generate`.

        Raises:
            ApiError: the model knows no such language, or the prompt has a mark of the model's, status 400.
        """
        config = self._engine.model.generation_config
        arguments: dict[str, Any] = {"timeout": self._options.timeout}
        if getattr(config, "is_multilingual", False):
            arguments["task"] = "transcribe"
        if request.language:
            known = getattr(config, "lang_to_id", None) or {}
            if f"<|{request.language.lower()}|>" not in known:
                codes = ", ".join(sorted(mark.strip("<|>") for mark in known))
                raise bad_request(
                    f"language is {request.language!r}; the model knows {codes or 'one alone'}", "language"
                )
            arguments["language"] = request.language.lower()
        if request.prompt:
            try:
                arguments["prompt_ids"] = self._processor.get_prompt_ids(request.prompt, return_tensors="pt")
            except ValueError as error:
                raise bad_request(f"the prompt cannot be made tokens: {error}", "prompt") from None
        if request.temperature:
            seed = draw_seed() if request.seed is None else request.seed % (1 << 63)
            arguments |= {"temperature": request.temperature, "seed": seed}
        return arguments

    def _inputs(self, data: bytes) -> tuple[dict[str, Any], float]:
        """Return what the model reads of a file, and its seconds."""
        extractor = self._processor.feature_extractor
        samples = read_sound(data, extractor.sampling_rate, self._options.max_audio_seconds)
        # Longer sound than the model reads at a time keeps its length, and `generate` walks over it by timestamps.
        is_long = len(samples) > extractor.n_samples
        whole = {"truncation": False, "padding": "longest"} if is_long else {}
        features = extractor(
            samples, sampling_rate=extractor.sampling_rate, return_tensors="pt", return_attention_mask=True, **whole
        )
        dtype: torch.dtype = self._engine.model.dtype
        inputs = {"input_features": features["input_features"].to(dtype), "attention_mask": features["attention_mask"]}
        return inputs | ({"return_timestamps": True} if is_long else {}), len(samples) / extractor.sampling_rate
