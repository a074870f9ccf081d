"""Reads the pictures of chats and turns them into model inputs with the model's own processor."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch

from parallelformers_ng.serving.api_errors import ApiError, bad_request, refusing
from parallelformers_ng.serving.serve_options import ServeOptions

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_RATIO = 200
"""Maximum ratio of a picture's long side to its short side, the same limit as in Qwen2-VL's processor.

Other processors enlarge the short side to a fixed length, so that a long picture would become huge.
"""


def _refused(why: str) -> ApiError:
    return bad_request(why, "messages")


class Pictures:
    """Converter of the text and the pictures of a chat to model inputs, with the model's transformers processor."""

    def __init__(self, processor: Any, options: ServeOptions) -> None:
        self._processor = processor
        self._options = options
        self._turn = asyncio.Lock()  # pictures of one request at a time, because decoded pictures take much memory

    async def inputs(self, text: str, addresses: list[str], special: bool) -> dict[str, torch.Tensor]:
        """Make the model inputs: `input_ids`, int64 `[1, tokens]`, and the other outputs of the model's processor.

        Args:
            text: prompt with one of the processor's placeholders for each picture.
            addresses: data URLs in base64, or file URLs inside `media_folder`, in the order of the placeholders.
            special: whether the processor adds its special tokens, such as BOS.
        """
        async with self._turn:
            return await asyncio.to_thread(self._inputs, text, addresses, special)

    def _inputs(self, text: str, addresses: list[str], special: bool) -> dict[str, torch.Tensor]:
        pictures = self._read(addresses)
        # Pass `add_special_tokens` only if False, as `ProcessorMixin.apply_chat_template` does.
        no_special = {} if special else {"add_special_tokens": False}
        with refusing((ValueError, TypeError, IndexError), "the model's processor refuses the pictures", "messages"):
            return dict(self._processor(text=text, images=[pictures], return_tensors="pt", **no_special))

    def _read(self, addresses: list[str]) -> list[Any]:
        """Open and decode pictures. The sizes of all pictures are checked before any picture is decoded."""
        from PIL import Image
        from transformers.image_utils import load_image

        if len(addresses) > self._options.max_pictures:
            raise _refused(f"the request has {len(addresses)} pictures; the limit is {self._options.max_pictures}")
        pixel_limit = self._options.max_pixels
        too_large = _refused(f"the pictures have more than {pixel_limit} pixels together (--max-pixels)")
        pictures, pixels = [], 0
        try:
            for address in addresses:
                pictures.append(Image.open(io.BytesIO(self._bytes(address)), formats=_FORMATS))
                short, long = sorted(pictures[-1].size)
                if long > MAX_RATIO * short:
                    sides = f"{short} by {long} pixels"
                    raise _refused(f"a picture has {sides}; the limit of the ratio is {MAX_RATIO} to 1")
                pixels += short * long
                if pixels > pixel_limit:
                    raise too_large
            return [load_image(picture) for picture in pictures]
        except Image.DecompressionBombError:  # the picture exceeds Pillow's own size limit
            raise too_large from None
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            formats, kind = ", ".join(_FORMATS), type(error).__name__
            raise _refused(f"a picture is damaged or not in a known format ({formats}): {kind}") from None

    def _bytes(self, address: str) -> bytes:
        scheme = address[:8].partition(":")[0].lower()
        if scheme == "data":
            head, _, data = address.partition(",")
            if not head.lower().endswith(";base64"):
                raise _refused("a data URL is not in base64; write data:image/png;base64,…")
            with refusing((binascii.Error,), "the data URL of a picture is not valid base64", "messages"):
                return base64.b64decode(data, validate=True)
        if scheme != "file":
            raise _refused(
                "the server does not download pictures; send a data URL (data:image/png;base64,…) or a file URL"
                " (file:///path)"
            )
        if self._options.media_folder is None:
            raise _refused("the server reads no picture files; start the server with --media-folder FOLDER")
        root = Path(self._options.media_folder).resolve()
        name = unquote(urlsplit(address).path)
        path = (root / name).resolve() if "\0" not in name else root
        # Both cases give the same error, so that clients cannot find out which files exist outside the folder.
        if not path.is_relative_to(root) or not path.is_file():
            raise _refused("the file does not exist in the folder of --media-folder")
        if path.stat().st_size > self._options.media_bytes:
            raise _refused(f"the picture file is larger than {self._options.media_bytes} bytes (--max-body-bytes)")
        return path.read_bytes()
