"""Converts tokens to bytes. A token can be a part of a character, which has bytes but no text."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}


class TokenBytes:
    """Converter of a tokenizer's tokens to bytes.

    Args:
        tokenizer: tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()}

    @functools.cached_property
    def _decoders(self) -> str:
        """Types and settings of a fast tokenizer's decoders, as JSON; "" for a slow tokenizer."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return "" if backend is None else json.dumps(json.loads(backend.to_str())["decoder"], ensure_ascii=False)

    def bytes(self, token: int) -> bytes:
        """Return the bytes of a token; b"" if the tokenizer does not know the id.

        A byte-level tokenizer writes bytes as characters of GPT-2's table (`bytes_to_unicode`). A SentencePiece
        tokenizer writes a single byte as `<0x0A>`, and a space as `▁`.

        Args:
            token: id of the token.
        """
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the model's vocabulary can be larger than the tokenizer's
            return b""
        if '"ByteLevel"' in self._decoders:
            parts = (_OF_CHARACTER.get(each, each) for each in piece)
            return b"".join(bytes([part]) if isinstance(part, int) else part.encode() for part in parts)
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if "▁" in piece and ("▁" in self._decoders or not self._decoders):
            return str(piece.replace("▁", " ")).encode()
        return self._tokenizer.decode([token]).encode()

    def text(self, token: int) -> str:
        """Return the text of a token. If its bytes are not valid UTF-8, all bytes become escapes, such as `\\xf0\\x9f`.

        Args:
            token: id of the token.
        """
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in raw)
