"""Makes values for the arguments of a forward, by the arguments' names and the model's configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelformers_ng.autopolicy.settings import setting

BATCH, LENGTH, DECODER_LENGTH = 2, 7, 4
_SAMPLES = 4000
_FRAMES = 64
_IDS = ("input_ids", "decoder_input_ids", "text_input_ids", "question_ids", "qformer_input_ids")
_SOUNDS = (
    "input_features", "input_values", "audio_values", "input_spectrogram", "spectrogram", "waveform", "audio_mel",
)  # fmt: skip
_SOUND_MASKS = ("input_features_mask", "feature_attention_mask")
_MASKS = ("attention_mask", "text_attention_mask")
_PICTURES = ("pixel_values", "images", "pixel_values_images")
_GRIDS = ("grid_thw", "image_grid_thw")
_POSITIONS = ("pixel_position_ids", "image_position_ids")
_STATES = ("hidden_states", "inputs_embeds", "query_embeds", "hidden_state", "features", "x")
_SERIES = ("past_values", "past_observed_mask", "future_values", "past_time_features", "future_time_features")
_WIDTHS = ("hidden_size", "d_model", "n_embd")
_ENCODER_WIDTHS = ("encoder_hidden_size", "cross_attention_dim", *_WIDTHS)
_BINS = (
    "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim", "input_feat_size", "model_in_dim",
)  # fmt: skip
_SIDE = 4  # number of patches along each side of an image that is given as patches


class SampleInputs:
    """A maker of random arguments for the forward of a model or of a part of a model."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model = model
        config = getattr(model, "config", None)
        # the configuration and all nested configurations, outer configurations first
        self.parts: list[Any] = [] if config is None else [config]
        for part in self.parts:  # the loop also visits the nested configurations that it appends
            self.parts += [value for value in vars(part).values() if hasattr(value, "to_dict")]
        self.generator = torch.Generator().manual_seed(seed)
        # Floating-point inputs have the data type of the model's first floating-point parameter.
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        parameters = inspect.signature(model.forward).parameters
        plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.names = {name for name, p in parameters.items() if p.kind in plain}  # names of the forward's arguments
        # names of the forward's arguments without a default
        self.required = {name for name, p in parameters.items() if p.kind in plain and p.default is p.empty}

    def arguments(self, wanted: set[str], image: str, mask: bool, rows: int = BATCH) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        if "pixel_values" in wanted and "spatial_shapes" in self.names:  # the model takes patches with a mask
            wanted = wanted | {"pixel_attention_mask", "spatial_shapes"}
        wanted = wanted | {"noise", "noise_sequence"}  # without these arguments, a forward would draw random numbers
        for name in sorted(wanted & self.names):
            value = self.value(name, image, rows)
            if value is not None:
                inputs[name] = value
        if mask and "input_ids" in inputs and "attention_mask" in self.names:
            inputs["attention_mask"] = torch.ones(inputs["input_ids"].shape, dtype=torch.long)
        encoded = any(name in inputs for name in ("input_ids", "input_features", "input_values", "pixel_values"))
        if "decoder_input_ids" in self.names and encoded:
            inputs["decoder_input_ids"] = self.ids(rows, DECODER_LENGTH)
        return inputs

    def value(self, name: str, image: str, rows: int) -> Any:
        """Return a value for one argument; None if the name is unknown. Ids and integer masks are int64."""
        if name == "input_ids" and "codebook_idx" in self.names:
            codes = self.number("n_codes_total", default=2)
            return self.ids(rows, LENGTH * codes).unflatten(-1, (LENGTH, codes))
        if name == "pixel_attention_mask" and "spatial_shapes" not in self.names:
            return None
        makers: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(_IDS, lambda: self.ids(rows, LENGTH)),
            **dict.fromkeys(_MASKS, lambda: torch.ones(rows, LENGTH, dtype=torch.long)),
            **dict.fromkeys(_PICTURES, lambda: self.pixels(image, rows)),
            **dict.fromkeys(_GRIDS, lambda: torch.tensor([[1, _SIDE, _SIDE]])),
            **dict.fromkeys(_POSITIONS, lambda: _positions().flip(-1).expand(rows, -1, -1)),
            **dict.fromkeys(_SOUNDS, lambda: self.sound(name, image, rows)),
            **dict.fromkeys(
                _SOUND_MASKS, lambda: torch.ones(self.sound("input_features", image, rows).shape[:2]).long()
            ),
            **dict.fromkeys(_STATES, lambda: self.states(rows)),
            **dict.fromkeys(_SERIES, lambda: self.series(name, rows)),
            "bbox": lambda: self.boxes(rows),
            "codebook_idx": lambda: 1,
            "task_inputs": lambda: self.ids(rows, self.number("task_seq_len", default=LENGTH)),
            "flattened_patches": lambda: self.placed_patches(rows),
            "pixel_values_videos": lambda: self.pixels("video", rows),
            "pixel_attention_mask": lambda: torch.ones(rows, _SIDE**2, dtype=torch.long),
            "spatial_shapes": lambda: torch.full((rows, 2), _SIDE),
            "image_sizes": lambda: torch.tensor([self.image_size()] * rows),
            "merge_sizes": lambda: torch.tensor([self.number("spatial_merge_size", default=1)]),
            "encoder_hidden_states": lambda: self.randn(rows, LENGTH - 2, self.number(*_ENCODER_WIDTHS, default=32)),
            "audio_mel_mask": lambda: torch.zeros(rows, _FRAMES, dtype=torch.bool),
            "noise": lambda: self.randn(rows, self.patches()),
            "noise_sequence": lambda: self.randn(rows, _FRAMES, self.number("model_in_channels", default=1)),
        }
        return makers[name]() if name in makers else None

    def find(self, *names: str, default: Any = None) -> Any:
        """Return the first value of the named attributes in `parts` that is neither None nor text, or `default`."""
        values = (setting(part, name) for part in self.parts for name in names)
        return next((value for value in values if value is not None and not isinstance(value, str)), default)

    def number(self, *names: str, default: int = 0) -> int:
        return int(self.find(*names, default=default))

    def randn(self, *shape: int) -> torch.Tensor:
        """Return normal random numbers in `dtype`, drawn in float64, so that inputs are the same in every data type."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def ids(self, rows: int, length: int) -> torch.Tensor:
        """Return random token ids `[rows, length]`, int64, from 3 to 499 within the vocabulary, without special ids."""
        vocabularies = [
            m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings > 40
        ]
        size = self.number("vocab_size", default=min(vocabularies, default=32))
        special = self.special_ids()
        usable = [index for index in range(3, min(size, 500)) if index not in special] or [0]
        picks = torch.randint(0, len(usable), (rows, length), generator=self.generator)
        return torch.tensor(usable)[picks]

    def special_ids(self) -> set[int]:
        """Return the token ids that settings of the configurations name, such as `eos_token_id`."""
        settings = [item for part in self.parts for item in vars(part).items()]
        ids = [value for key, value in settings if key.endswith(("_id", "token_index"))]
        for key, value in settings:
            ids += value if key.endswith("token_id") and isinstance(value, list) else []
        return {token for token in ids if isinstance(token, int)}

    def boxes(self, rows: int) -> torch.Tensor:
        corners = torch.randint(0, 8, (2, rows, LENGTH, 2), generator=self.generator)
        return torch.cat([corners[0], corners[0] + corners[1]], dim=-1)

    def image_size(self) -> tuple[int, int]:
        """Return the height and the width of images in pixels; 64 if the configuration does not say."""
        size = self.find("image_size", "img_size", "input_size", default=64)
        if isinstance(size, dict):
            size = (size.get("height", 64), size.get("width", 64))
        sides = [*size] if isinstance(size, (list, tuple)) else [size]
        height, width = (sides * 2)[-2:]  # a single number is both height and width
        return int(height), int(width)

    def pixels(self, image: str, rows: int) -> torch.Tensor:
        channels = self.find("num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        if self.names & set(_POSITIONS) or (image != "video" and "spatial_shapes" in self.names):
            return self.randn(rows, _SIDE**2, self.patch_width(channels))
        if image == "flat":
            return self.randn(_SIDE**2, self.patch_width(channels))
        if image == "patches":
            return self.randn(_SIDE**2, channels, self.patch_side(), self.patch_side())
        if image == "video":
            frames = self.number("num_frames", "frames_per_clip", "temporal_patch_size", default=2)
            return self.randn(rows, frames, channels, *self.image_size())
        return self.randn(rows, channels, *((224, 224) if image == "wide" else self.image_size()))

    def placed_patches(self, rows: int) -> torch.Tensor:
        """Return flattened patches of images, `[rows, 16, 2 + values]`; each begins with its position in its image."""
        places = (_positions() + 1).to(self.dtype).expand(rows, -1, -1)
        return torch.cat([places, self.randn(rows, _SIDE**2, self.patch_width(3))], dim=-1)

    def patch_side(self) -> int:
        """Return the width of a patch in pixels; 16 if the configuration does not say."""
        patch = self.find("patch_size", default=16)
        return int(patch) if isinstance(patch, int) else int(patch[-1])

    def patch_width(self, channels: int) -> int:
        """Return the number of values of a flattened patch, from the layer that embeds patches or the configuration."""
        for name, module in self.model.named_modules():
            if "patch" in name and isinstance(module, nn.Linear):
                return module.in_features
            if "patch" in name and isinstance(module, (nn.Conv2d, nn.Conv3d)):
                return module.in_channels * math.prod(module.kernel_size)
        return channels * self.number("temporal_patch_size", default=1) * self.patch_side() ** 2

    def patches(self) -> int:
        height, width = self.image_size()
        return (height // self.patch_side()) * (width // self.patch_side())

    def sound(self, name: str, image: str, rows: int) -> torch.Tensor:
        if name == "input_values" and image in ("plain", "flat"):
            return self.randn(*((rows, _SAMPLES) if image == "plain" else (rows, 1, _SAMPLES)))
        first = next((m for m in self.model.modules() if isinstance(m, (nn.Conv1d, nn.Linear))), None)
        if image == "flat" and isinstance(first, nn.Linear):
            return self.randn(rows, _FRAMES, first.in_features)
        bins = self.number(*_BINS, default=80)
        if name == "input_features" and image == "plain" and (positions := self.number("max_source_positions")):
            return self.randn(rows, bins, 2 * positions)
        if image == "video":
            return self.randn(rows, bins, _FRAMES)
        return self.randn(rows, self.number("max_length", default=_FRAMES) if name == "input_values" else _FRAMES, bins)

    def states(self, rows: int) -> torch.Tensor:
        """Return random hidden states `[rows, 7, width]`, or flattened patches if the forward takes `grid_thw`."""
        if "grid_thw" in self.names:
            return self.pixels("flat", rows)
        return self.randn(rows, LENGTH, self.number(*_WIDTHS, default=32))

    def series(self, name: str, rows: int) -> torch.Tensor | None:
        """Return one argument of a time-series model, `[rows, times]` or `[rows, times, channels]`.

        Values are in `dtype`; a mask is float32. The result is None for `future_values` of a model with a number of
        input channels.
        """
        lags = max(self.find("lags_sequence", default=[0]) or [0])
        past = self.number("context_length", "prediction_length", default=16) + (lags if isinstance(lags, int) else 0)
        future = self.number("prediction_length", default=4)
        channels = [count] if (count := self.number("num_input_channels")) else []
        if name == "past_values":
            return self.randn(rows, past, *channels)
        if name == "past_observed_mask":
            return torch.ones(rows, past, *channels)
        if name == "future_values":
            return None if channels else self.randn(rows, future)
        features = self.number("num_time_features") + self.number("num_dynamic_real_features")
        return self.randn(rows, past if name.startswith("past") else future, features)


def _positions() -> torch.Tensor:
    """Return the row and the column of each patch, from 0, `[16, 2]`, int64."""
    sides = torch.arange(_SIDE)
    return torch.cartesian_prod(sides, sides)
