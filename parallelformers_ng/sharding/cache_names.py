"""The names of a cache among the arguments and the outputs of a model."""

from __future__ import annotations

from transformers.generation import utils

CACHE: str = utils.ALL_CACHE_NAMES[0]
"""In this release of transformers: "past_key_values", and "cache" from 5.24 on."""
CACHES = ("cache", "past_key_values", "cache_params")
"""In any release, and as callers may still write it."""
