"""Names of a cache among the arguments and the outputs of a model."""

from __future__ import annotations

from transformers.generation import utils

# Name in the installed release of transformers: "past_key_values", and "cache" from 5.24 on.
CACHE: str = utils.ALL_CACHE_NAMES[0]
# Names in all supported releases of transformers, all of which callers may use.
CACHES = ("cache", "past_key_values", "cache_params")
