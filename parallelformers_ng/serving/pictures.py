"""Pictures in chats: from the parts of messages to what the model's own processor makes of them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch

from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.serve_options import ServeOptions

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_RATIO = 200
"""Long side to short side, as Qwen2-VL's processor has it. Others scale the short side, and the long one with it."""


class Pictures:
    """Makes inputs of a model from a chat's text and its pictures, one request after another.

    Args:
        processor: the model's, of transformers.
        options: the limits, and where files may lie.
    """

    def __init__(self, processor: Any, options: ServeOptions) -> None:
        self._processor = processor
        self._options = options
        self._turn = asyncio.Lock()  # the memory is that of one request's pictures

    async def inputs(self, text: str, addresses: list[str], special: bool) -> dict[str, torch.Tensor]:
        """Return what the model reads: `input_ids` `[1, tokens]`, `pixel_values` and more, as its processor names them.

        Args:
            text: the prompt, with the processor's mark for each picture.
            addresses: data URLs, or URLs of files, in the order of the marks.
            special: whether the tokens come first that the model's prompts begin with.

        Raises:
            ApiError: a picture is not there, is damaged or too large, or the text has other marks, status 400.
        """
        async with self._turn:
            return await asyncio.to_thread(self._inputs, text, addresses, special)

    def _inputs(self, text: str, addresses: list[str], special: bool) -> dict[str, torch.Tensor]:
        pictures = self._read(addresses)
        # As `apply_chat_template` of processors calls them.
        no_special = {} if special else {"add_special_tokens": False}
        try:
            return dict(self._processor(text=text, images=[pictures], return_tensors="pt", **no_special))
        except (ValueError, TypeError, IndexError) as error:
            raise bad_request(f"the model's processor refuses the pictures: {error}", "messages") from None

    def _read(self, addresses: list[str]) -> list[Any]:
        """Return the pictures, decoded. The sizes of all are checked before the first is decoded."""
        from PIL import Image
        from transformers.image_utils import load_image

        if len(addresses) > self._options.max_pictures:
            raise bad_request(
                f"the request has {len(addresses)} pictures, and may have {self._options.max_pictures}", "messages"
            )
        too_large = bad_request(
            f"the pictures have more than {self._options.max_pixels} pixels (--max-pixels)", "messages"
        )
        pictures, pixels = [], 0
        try:
            for address in addresses:
                pictures.append(Image.open(io.BytesIO(self._bytes(address)), formats=_FORMATS))
                sides = sorted(pictures[-1].size)
                if sides[1] > MOST_RATIO * sides[0]:
                    raise bad_request(
                        f"a picture is {sides[0]} by {sides[1]}; it may have {MOST_RATIO} to 1", "messages"
                    )
                pixels += sides[0] * sides[1]
                if pixels > self._options.max_pixels:
                    raise too_large
            return [load_image(picture) for picture in pictures]
        except Image.DecompressionBombError:  # a limit of Pillow's own
            raise too_large from None
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            raise bad_request(
                f"a picture cannot be read as {', '.join(_FORMATS)}: {type(error).__name__}", "messages"
            ) from None

    def _bytes(self, address: str) -> bytes:
        """Return the content of a picture's file."""
        scheme = address[:8].partition(":")[0].lower()
        if scheme == "data":
            head, _, data = address.partition(",")
            if not head.lower().endswith(";base64"):
                raise bad_request("a data URL takes base64: data:image/png;base64,…", "messages")
            try:
                return base64.b64decode(data, validate=True)
            except binascii.Error as error:
                raise bad_request(f"the data of a picture are no base64: {error}", "messages") from None
        if scheme == "file":
            return self._file(unquote(urlsplit(address).path))
        raise bad_request(
            "a picture is a data URL (data:image/png;base64,…) or a file of the server's; the server fetches nothing",
            "messages",
        )

    def _file(self, name: str) -> bytes:
        """Return the content of a file within the folder that may be read; symbolic links are followed first."""
        if self._options.media_folder is None:
            raise bad_request("files are not read; start the server with --media-folder FOLDER", "messages")
        root = Path(self._options.media_folder).resolve()
        path = (root / name).resolve() if "\0" not in name else root
        # A path outside is as one that is not there: the answer tells nothing of other folders.
        if not path.is_relative_to(root) or not path.is_file():
            raise bad_request("there is no such file in the folder of --media-folder", "messages")
        if path.stat().st_size > self._options.media_bytes:
            raise bad_request(f"the file is larger than {self._options.media_bytes} bytes", "messages")
        return path.read_bytes()
