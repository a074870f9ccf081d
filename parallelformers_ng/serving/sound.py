"""Sound files to samples at the rate that a model reads."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from parallelformers_ng.serving.api_errors import bad_request

_MOST_RATE = 192_000
_MOST_CHANNELS = 8
_UNKNOWN = (1 << 63) - 1  # frames of a file whose head does not say, as of a stream
_BLOCK = 1 << 16  # frames that are decoded at a time


def read_sound(data: bytes, rate: int, most_seconds: float) -> Any:
    """Return the samples of a file, all channels mixed into one: float32, `[samples]`.

    The length is checked by the file's head before anything is decoded, and again while it is, as heads may lie.

    Args:
        data: the file, in a format of libsndfile's: WAV, FLAC, Ogg, MP3 and others.
        rate: samples a second of the result.
        most_seconds: seconds that it may have.

    Raises:
        ApiError: it is no such file, or is too long, status 400.
    """
    import soundfile
    import soxr

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if not 1000 <= file.samplerate <= _MOST_RATE or file.channels > _MOST_CHANNELS:
                raise bad_request(
                    f"the file has {file.channels} channels at {file.samplerate} Hz; it may have {_MOST_CHANNELS} at"
                    f" 1000 to {_MOST_RATE} Hz",
                    "file",
                )
            most = int(most_seconds * file.samplerate)
            too_long = bad_request(f"the file is longer than {most_seconds:g} s (--max-audio-seconds)", "file")
            if most < file.frames < _UNKNOWN:
                raise too_long
            parts, frames = [], 0
            while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
                frames += len(block)
                if frames > most:
                    raise too_long
                parts.append(block.mean(1))
            file_rate = file.samplerate
    except soundfile.SoundFileError as error:
        raise bad_request(f"the file cannot be read: {error}", "file") from None
    if not parts:
        raise bad_request("the file has no sound", "file")
    samples = np.concatenate(parts)
    if not np.isfinite(samples).all():
        raise bad_request("the file has samples that are no numbers", "file")
    return samples if file_rate == rate else soxr.resample(samples, file_rate, rate, quality="HQ")
