"""Makes default configurations, with the settings that some of them need to be built."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig

_RESNET = {
    "backbone_config": {
        "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1],
        "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
    },
}  # fmt: skip
"""A replacement for a backbone from timm, which is not required."""
_LAST_STAGE = {**_RESNET, "backbone_config": {**_RESNET["backbone_config"], "out_features": ["stage4"]}}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "patch_size": 14,
    "intermediate_size": 4304,
    "image_size": 384,
    "num_hidden_layers": 4,
    "vision_use_head": False,
}
"""A replacement for a tower that is not required, or has no default."""
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}

_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 16,
    "indexer_compress_ratio": 2,
}

_SIDES = {"long": 7, "mid": 5, "short": 3}
_INTRACLASS = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    **{f"vertical_long_to_small_conv_{s}ratio": [[k, 1], [1, 1], [k // 2, 0]] for s, k in _SIDES.items()},
    **{f"horizontal_small_to_long_conv_{s}ratio": [[1, k], [1, 1], [0, k // 2]] for s, k in _SIDES.items()},
    **{f"symmetric_conv_long_{s}ratio": [[k, k], [1, 1], [k // 2, k // 2]] for s, k in _SIDES.items()},
}

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
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "hunyuan_vl_text": {"head_dim": 128},
    "bamba": {"attn_layer_indices": [1, 3]},
    "aya_vision": {"vision_config": SIGLIP},
    "conditional_detr": _LAST_STAGE,
    "dab-detr": _LAST_STAGE,
    "detr": _LAST_STAGE,
    "table-transformer": _LAST_STAGE,
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "deformable_detr": _RESNET,
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY}},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 11, "num_experts_per_tok": 2},
        "vision_config": {
            "encoder_config": {
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
            }
        },
    },
    "emu3": {
        "vocabulary_map": {
            "<image>": 40,
            "<|extra_200|>": 41,
            **{f"<|visual token {i:06d}|>": 42 + i % 80 for i in range(2048)},
        },
        "vq_config": {
            "codebook_size": 2048,
            "base_channels": 32,
            "hidden_size": 128,
            "channel_multiplier": [1, 2, 2, 4],
        },
    },
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**_ROTARY, "mrope_section": [22, 22, 20]}}},
    "granite4_vision": {
        "deepstack_layer_map": [[-2, 0], [-1, 1]],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "1/2",
        "image_grid_pinpoints": [[336, 336], [672, 336]],
    },
    "janus": {"vq_config": {"base_channels": 32}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "chameleon": {"vocabulary_map": {"<image>": 40, "<pad>": 1, "IMGIMGA1Z": 41, "IMGIMGA2Z": 42}},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 10000.0, "clip_qkv": 2.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "glm4v_moe_text": {"head_dim": 128},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "diffusion_gemma": {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704}},
    "qwen3_omni_moe": {
        "talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 768}},
    },
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "lw_detr": {"projector_scale_factors": [1.0]},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "omdet-turbo": {
        "backbone_config": {
            "model_type": "swin",
            "embed_dim": 48,
            "depths": [2, 2, 2, 2],
            "num_heads": [2, 4, 8, 16],
            "window_size": 4,
            "out_indices": [2, 3, 4],
        },
        "encoder_in_channels": [96, 192, 384],
    },
    "perceiver": {"num_self_attends_per_block": 2},
    "pp_ocrv5_server_det": {
        "intraclass_block_config": _INTRACLASS,
        "kernel_list": [3, 2, 2],
        "scale_factor_list": [1, 2, 2, 2],
    },
    "pp_ocrv6_medium_det": {
        "intraclass_block_config": _INTRACLASS,
        "kernel_list": [3, 2, 2],
        "scale_factor_list": [1, 2, 2, 2],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}


def configuration(model_type: str, config_name: str, **settings: Any) -> PreTrainedConfig:
    """Return the default configuration of a model type with its necessary settings, and `settings`."""
    return getattr(transformers, config_name)(**_SETTINGS.get(model_type, {}), **settings)
