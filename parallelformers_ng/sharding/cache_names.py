"""Names under which a model takes and returns its KV cache."""

from __future__ import annotations

from transformers.generation import utils

# The installed transformers calls the KV cache "past_key_values", or from 5.24 on "cache".
CACHE: str = utils.ALL_CACHE_NAMES[0]
# Callers may pass a KV cache under any of the names that a supported release of transformers uses.
CACHES = ("cache", "past_key_values", "cache_params")
