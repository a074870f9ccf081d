"""Makes inputs for a model from the signature of its forward and its configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from parallelformers_ng.autopolicy.sample_inputs import DECODER_LENGTH, SampleInputs
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

_CROSS = re.compile(
    r"encoder_attn|cross_?attn|cross_?attention|encoder_decoder_attention|EncDecAttention", re.IGNORECASE
)


def candidate_inputs(model: nn.Module, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments for `model.forward`, those with which the forward should call most modules first.

    The caller tries the arguments in this order until a forward pass succeeds. Tensors are on CPU. Ids are int64, and
    floating-point values have the data type of the model's first floating-point parameter. The batch size is 1 or 2.
    """
    maker = SampleInputs(model, seed)
    yield from _media_in_text(maker)
    named = maker.names
    text = [name for name in ("input_ids", "bbox") if name in named]
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) and main in named else next(iter(named), "")
    if "encoder_hidden_states" in named and any(_CROSS.search(name) for name, _ in model.named_modules()):
        yield maker.arguments({main, "encoder_hidden_states", *text, *maker.required}, "plain", True)
    for image in ("plain", "flat", "patches", "video", "wide"):
        for mask in (True, False):
            yield maker.arguments({main, *text, *maker.required}, image, mask)
        yield maker.arguments({main, *maker.required}, image, False)
        yield maker.arguments({main, "pixel_values", *text, *maker.required}, image, False)
    yield maker.arguments({main, *maker.required}, "plain", False, rows=1)


def _media_in_text(maker: SampleInputs) -> Iterator[dict[str, Any]]:
    if "input_ids" not in maker.names:
        return
    media = [kind for kind in (next(_images(maker), None), next(_sounds(maker), None)) if kind]
    if len(media) > 1:
        yield _text(maker, *media)
    yield from (_text(maker, kind) for kind in media)


# An image or a sound: id of its placeholder token, number of placeholders, and the model's arguments for it.
Media = tuple[int, int, dict[str, Any]]


def _text(maker: SampleInputs, *media: Media) -> dict[str, Any]:
    pieces = [maker.ids(1, 3)]
    arguments: dict[str, Any] = {}
    for token, count, media_inputs in media:
        pieces += [torch.full((1, count), token), maker.ids(1, 4)]
        arguments |= media_inputs
    ids = torch.cat(pieces, dim=1)
    arguments |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "decoder_input_ids" in maker.names:
        arguments["decoder_input_ids"] = maker.ids(1, DECODER_LENGTH)
    kinds = torch.zeros_like(ids)
    for kind, (token, _, _) in enumerate(media, start=1):
        kinds[ids == token] = kind
    return arguments | dict.fromkeys({"mm_token_type_ids", "token_type_ids"} & maker.names, kinds)


def _images(maker: SampleInputs) -> Iterator[Media]:
    token = maker.find("image_token_id", "image_token_index")
    method = getattr(maker.model, "get_image_features", None)
    if not isinstance(token, int) or method is None or "pixel_values" not in maker.names:
        return
    grids = "image_grid_thw" in maker.names
    for image in ("flat", "patches") if grids else ("plain", "video"):
        arguments: dict[str, Any] = {"pixel_values": maker.pixels(image, 1)}
        for name in sorted({"image_grid_thw", "image_position_ids", "qformer_input_ids", "image_sizes"} & maker.names):
            arguments[name] = maker.value(name, image, 1)
        if count := _tokens_of(method, arguments):
            yield token, count, arguments


def _sounds(maker: SampleInputs) -> Iterator[Media]:
    token = maker.find("audio_token_id", "audio_token_index")
    method = getattr(maker.model, "get_audio_features", None)
    name = next((n for n in ("input_features", "input_values") if n in maker.names), "")
    if not isinstance(token, int) or method is None or not name:
        return
    for image in ("plain", "flat", "video", "wide"):
        sound = maker.sound(name, image, 1)
        for frames in dict.fromkeys((sound.shape[-1], sound.shape[1])):
            masks = {"input_features_mask", "feature_attention_mask", "padding_mask"} & maker.names
            arguments = {name: sound, **dict.fromkeys(masks, torch.ones(1, frames, dtype=torch.long))}
            if count := _tokens_of(method, arguments):
                yield token, count, arguments


def _tokens_of(method: Any, arguments: dict[str, Any]) -> int:
    """Return how many tokens an encoder method makes of an image or sound; 0 if it raises on the arguments."""
    accepted = inspect.signature(method).parameters
    free = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in accepted.values())
    try:
        with torch.no_grad():
            features = method(**{name: value for name, value in arguments.items() if free or name in accepted})
    except Exception as error:  # the model's own code may raise any exception on inputs of another format
        raise_if_of_handler(error)
        return 0
    features = getattr(features, "pooler_output", features)
    pieces = list(features) if isinstance(features, (list, tuple)) else [features]
    width = pieces[0].shape[-1] if pieces and isinstance(pieces[0], torch.Tensor) else 0
    return sum(piece.numel() for piece in pieces) // width if width else 0
