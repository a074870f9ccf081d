"""Decodes sound files to samples at the sampling rate of a model."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from parallelformers_ng.serving.api_errors import bad_request

_MOST_RATE = 192_000
_MOST_CHANNELS = 8
_UNKNOWN = (1 << 63) - 1  # number of frames in a file whose header has no length, such as a recorded stream
_BLOCK = 1 << 16  # number of frames to decode at a time


def read_sound(data: bytes, rate: int, most_seconds: float) -> Any:
    """Decode a sound file, and return samples with all channels mixed into one, a numpy array float32 `[samples]`.

    The length is checked in the header before the decoding, and again while decoding, because a header can be wrong.
    The package soxr resamples the sound.

    Args:
        data: content of the file in a format of libsndfile, such as WAV, FLAC, Ogg or MP3.
        rate: sampling rate of the result in Hz.
        most_seconds: maximum length of the sound in seconds.

    Raises:
        ApiError: status 400. The file has an unknown format, is empty, is too long, or has samples that are not finite.
            Or the file has more than 8 channels, or its sampling rate is not from 1 to 192 kHz.
        ImportError: the package soundfile or soxr is missing.
    """
    import soundfile
    import soxr

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if not 1000 <= file.samplerate <= _MOST_RATE or file.channels > _MOST_CHANNELS:
                raise bad_request(
                    f"the file has {file.channels} channels at {file.samplerate} Hz; send at most"
                    f" {_MOST_CHANNELS} channels at 1000 to {_MOST_RATE} Hz",
                    "file",
                )
            most_frames = int(most_seconds * file.samplerate)
            too_long = bad_request(f"the file is longer than {most_seconds:g} s (--max-audio-seconds)", "file")
            if most_frames < file.frames < _UNKNOWN:
                raise too_long
            parts, frames = [], 0
            while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
                frames += len(block)
                if frames > most_frames:
                    raise too_long
                parts.append(block.mean(1))
            file_rate = file.samplerate
    except soundfile.SoundFileError as error:
        raise bad_request(f"the sound file cannot be read: {error}", "file") from None
    if not parts:
        raise bad_request("the file has no sound", "file")
    samples = np.concatenate(parts)
    if not np.isfinite(samples).all():
        raise bad_request("the file has samples that are infinite or not a number", "file")
    return samples if file_rate == rate else soxr.resample(samples, file_rate, rate, quality="HQ")
