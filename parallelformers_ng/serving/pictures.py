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

from parallelformers_ng.serving.api_errors import bad_request, refusing
from parallelformers_ng.serving.serve_options import ServeOptions

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_RATIO = 200
"""Maximum ratio of a picture's long side to its short side, the same limit as in Qwen2-VL's processor.

Other processors enlarge the short side to a fixed length, so that a long picture would become huge.
"""


class Pictures:
    """Reader of pictures, which makes the inputs of a model from the text and the pictures of a chat.

    Only one request at a time is read, to limit memory. The formats are PNG, JPEG, WEBP and GIF.

    Args:
        processor: processor of the model, from transformers.
        options: limits of the server, and the folder of picture files.
    """

    def __init__(self, processor: Any, options: ServeOptions) -> None:
        self._processor = processor
        self._options = options
        self._turn = asyncio.Lock()  # one request at a time, to limit memory

    async def inputs(self, text: str, addresses: list[str], special: bool) -> dict[str, torch.Tensor]:
        """Return the model inputs: `input_ids`, int64 `[1, tokens]`, and the other outputs of the model's processor.

        The processor decides the shapes of the other tensors, such as `pixel_values`, float32.

        Args:
            text: prompt with one of the processor's placeholders for each picture.
            addresses: data URLs in base64, or file URLs inside `media_folder`, in the order of the placeholders.
            special: whether the processor adds its special tokens, such as BOS.

        Raises:
            ApiError: status 400. The pictures are too many or too large, or the number of placeholders is wrong. Or a
                picture is missing, is damaged, has too long sides, or has another kind of URL.
        """
        async with self._turn:
            return await asyncio.to_thread(self._inputs, text, addresses, special)

    def _inputs(self, text: str, addresses: list[str], special: bool) -> dict[str, torch.Tensor]:
        pictures = self._read(addresses)
        # The call is the same as in `apply_chat_template` of processors.
        no_special = {} if special else {"add_special_tokens": False}
        with refusing((ValueError, TypeError, IndexError), "the model's processor refuses the pictures", "messages"):
            return dict(self._processor(text=text, images=[pictures], return_tensors="pt", **no_special))

    def _read(self, addresses: list[str]) -> list[Any]:
        """Decode the pictures after a check of every picture's size."""
        from PIL import Image
        from transformers.image_utils import load_image

        if len(addresses) > self._options.max_pictures:
            raise bad_request(
                f"the request has {len(addresses)} pictures; the limit is {self._options.max_pictures}",
                "messages",
            )
        too_large = bad_request(
            f"the pictures have more than {self._options.max_pixels} pixels together (--max-pixels)", "messages"
        )
        pictures, pixels = [], 0
        try:
            for address in addresses:
                pictures.append(Image.open(io.BytesIO(self._bytes(address)), formats=_FORMATS))
                sides = sorted(pictures[-1].size)
                if sides[1] > MOST_RATIO * sides[0]:
                    raise bad_request(
                        f"a picture has {sides[0]} by {sides[1]} pixels; the limit of the ratio is {MOST_RATIO} to 1",
                        "messages",
                    )
                pixels += sides[0] * sides[1]
                if pixels > self._options.max_pixels:
                    raise too_large
            return [load_image(picture) for picture in pictures]
        except Image.DecompressionBombError:  # Pillow's own size limit
            raise too_large from None
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            raise bad_request(
                f"a picture is damaged or not in a known format ({', '.join(_FORMATS)}): {type(error).__name__}",
                "messages",
            ) from None

    def _bytes(self, address: str) -> bytes:
        """Return the bytes of a picture from its data URL, or from its file URL inside the media folder."""
        scheme = address[:8].partition(":")[0].lower()
        if scheme == "data":
            head, _, data = address.partition(",")
            if not head.lower().endswith(";base64"):
                raise bad_request("a data URL is not in base64; write data:image/png;base64,…", "messages")
            with refusing((binascii.Error,), "the data URL of a picture is not valid base64", "messages"):
                return base64.b64decode(data, validate=True)
        if scheme != "file":
            raise bad_request(
                "the server does not download pictures; send a data URL (data:image/png;base64,…) or a file URL"
                " (file:///path)",
                "messages",
            )
        if self._options.media_folder is None:
            raise bad_request(
                "the server reads no picture files; start the server with --media-folder FOLDER", "messages"
            )
        root = Path(self._options.media_folder).resolve()
        name = unquote(urlsplit(address).path)
        path = (root / name).resolve() if "\0" not in name else root
        # A path outside the folder and a missing file give the same error, which reveals nothing about other folders.
        if not path.is_relative_to(root) or not path.is_file():
            raise bad_request("the file does not exist in the folder of --media-folder", "messages")
        if path.stat().st_size > self._options.media_bytes:
            raise bad_request(
                f"the picture file is larger than {self._options.media_bytes} bytes (--max-body-bytes)", "messages"
            )
        return path.read_bytes()
