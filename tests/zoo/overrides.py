"""Settings without which a default configuration cannot be built, and default configurations for all others."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig

_SETTINGS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "informer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "wav2vec2-conformer": {"vocab_size": 40},
    "wav2vec2-bert": {"vocab_size": 40},
    "reformer": {"is_decoder": True},
    "nemotron": {"num_key_value_heads": 24, "num_attention_heads": 48},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "bamba": {"attn_layer_indices": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}


def configuration(model_type: str, config_name: str) -> PreTrainedConfig:
    """The default configuration of a model type, with the settings that it cannot do without."""
    return getattr(transformers, config_name)(**_SETTINGS.get(model_type, {}))
