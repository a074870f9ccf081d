"""Makes hostile requests with pictures and sound: damaged files, huge sizes in headers, wrong URLs."""

from __future__ import annotations

import base64
import functools
import io
import json
import random
import struct
import zlib
from typing import Any

import numpy as np
import soundfile
from PIL import Image

_BOUNDARY = "----x"


def picture_request(source: random.Random) -> bytes:
    """Return a request for a chat, a response or tokens, with a hostile picture."""
    address = source.choice(_ADDRESSES)(source)
    count = source.choice((1, 1, 1, 3, 20)) if len(address) < 5000 else 1
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": address}}] * count
    parts.insert(source.randint(0, 1), {"type": "text", "text": source.choice(("What?", "<image>" * 300, "\x00"))})
    if source.random() < 0.2:
        inputs = [{"type": "input_image", "image_url": address}]
        return _post("/v1/responses", json.dumps({"input": [{"role": "user", "content": inputs}]}).encode())
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    return _post(source.choice(("/v1/chat/completions", "/tokenize")), json.dumps(body).encode())


def sound_request(source: random.Random) -> bytes:
    """Return a form with a hostile sound file, or a hostile form."""
    data = source.choice(_SOUNDS)(source)
    fields = {"model": "tiny", "language": "en"}
    for _ in range(source.randint(0, 2)):
        name = source.choice(
            ("model", "language", "prompt", "temperature", "seed", "response_format", "stream", "x" * 500)
        )
        fields[name] = source.choice(("", "x" * 10_000, "nan", "-1", "\x00", "🙂", "[]", "1e999", "<|en|>"))
    head = "".join(
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    name = source.choice(("a.wav", "../../etc/passwd", "x" * 5000, "a\x00b"))
    head += f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    body = head.encode() + data + f"\r\n--{_BOUNDARY}--\r\n".encode()
    mangled = source.random()
    if mangled < 0.1:
        body = body[: source.randrange(len(body))]
    elif mangled < 0.2:
        body = body.replace(_BOUNDARY.encode(), b"--y", 1)
    elif mangled < 0.25:
        body = b"--%b\r\n" % _BOUNDARY.encode() * 20_000
    return _post("/v1/audio/transcriptions", body, f"multipart/form-data; boundary={_BOUNDARY}")


def _post(path: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@functools.cache
def _png(width: int, height: int, lines: int | None = None, text: int = 0) -> bytes:
    """Return a black PNG file.

    Args:
        width: width in the header, in pixels.
        height: height in the header, in pixels.
        lines: number of rows in the file; None for `height`.
        text: size of an additional compressed text, in bytes.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    note = chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(text))) if text else b""
    packer = zlib.compressobj(9)
    pixels = b"".join(packer.compress(bytes(1 + 3 * width)) for _ in range(height if lines is None else lines))
    body = chunk(b"IDAT", pixels + packer.flush())
    return b"\x89PNG\r\n\x1a\n" + head + note + body + chunk(b"IEND", b"")


@functools.cache
def _photo(kind: str) -> bytes:
    file = io.BytesIO()
    frames = [Image.effect_noise((200, 100), shade).convert("RGB") for shade in (10, 90)]
    more = {"save_all": True, "append_images": frames[1:] * 50} if kind == "GIF" else {}
    frames[0].save(file, kind, **more)
    return file.getvalue()


def _flipped(data: bytes, source: random.Random) -> bytes:
    """Return the data with some bytes changed, and with a random part of the second half cut off."""
    damaged = bytearray(data)
    for _ in range(source.randint(1, 20)):
        damaged[source.randrange(len(damaged))] = source.randrange(256)
    return bytes(damaged[: source.randint(len(damaged) // 2, len(damaged))])


_ADDRESSES = (
    lambda source: _url(_png(60_000, 60_000, 1)),
    lambda source: _url(_png(12_000, 12_000, 1)),
    lambda source: _url(_png(3000, 3000, 5)),
    lambda source: _url(_png(4096, 4096)),  # the maximum of pixels in a request, in a file of 50 kB
    lambda source: _url(_png(10, 10, text=50 << 20)),
    lambda source: _url(_png(0, 0)),
    lambda source: _url(_png(1, 1 << 23, 1)),
    *(
        lambda source, kind=kind: _url(_flipped(_photo(kind), source), f"image/{kind}")
        for kind in ("PNG", "JPEG", "WEBP", "GIF")
    ),
    lambda source: _url(source.randbytes(source.randint(0, 5000))),
    lambda source: _url(b"<svg onload='x'/>", "image/svg+xml"),
    lambda source: _url(bytes(2 << 20)),
    lambda source: "data:image/png;base64," + "#" * 5000,
    lambda source: "data:," + "x" * 5000,
    lambda source: source.choice(("file:///etc/passwd", "file:///proc/self/mem", "file://../../passwd", "/etc/passwd")),
    lambda source: source.choice(("http://169.254.169.254/", "HTTP://[::1]:22/", "ftp://x/y", "gopher://x", "")),
)  # fmt: skip


@functools.cache
def _sound(kind: str, seconds: float, rate: int = 16_000, channels: int = 1) -> bytes:
    """Return a sound file of silence, which is small in some formats."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros((int(seconds * rate), channels), "int16"), rate, format=kind)
    return file.getvalue()


def _of_unknown_length(flac: bytes) -> bytes:
    """Return a FLAC file without the length in its header: 36 bits from the 21st byte on."""
    return flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]


_SOUNDS = (
    lambda source: _sound("FLAC", 700),
    lambda source: _of_unknown_length(_sound("FLAC", 700)),
    lambda source: _sound("FLAC", 6, 48_000, 8),
    lambda source: _sound("OGG", 6, 48_000),
    lambda source: _sound("WAV", 30)[:44] + source.randbytes(1000),
    lambda source: _sound("WAV", 1, 192_000),
    lambda source: _sound("WAV", 1, 500_000),
    *(lambda source, kind=kind: _flipped(_sound(kind, 2), source) for kind in ("WAV", "FLAC", "OGG", "MP3", "AIFF")),
    lambda source: source.randbytes(source.randint(0, 5000)),
    lambda source: bytes(2 << 20),
    lambda source: bytes(17 << 20),
    lambda source: b"",
)  # fmt: skip
