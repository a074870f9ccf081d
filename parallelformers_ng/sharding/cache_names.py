"""Names of a cache among the arguments and the outputs of a model."""

from __future__ import annotations

from transformers.generation import utils

CACHE: str = utils.ALL_CACHE_NAMES[0]
"""Name in the installed release of transformers: "past_key_values", and "cache" from 5.24 on."""
CACHES = ("cache", "past_key_values", "cache_params")
"""Names in all supported releases of transformers, all of which callers may use."""
