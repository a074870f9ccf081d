"""Tests that the meaning of numbers in a configuration is derived from the model's tensor shapes, not from names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from parallelformers_ng.autopolicy.config_numbers import LONG, shapes_of
from parallelformers_ng.autopolicy.shrink import Shrinking, shrink
from parallelformers_ng.autopolicy.twin_making import first_choice, make_twin


def shrunk(cls: type[tf.PreTrainedModel], config: tf.PreTrainedConfig) -> Any:
    """Return the configuration shrunk as far as a model of this class allows."""
    with torch.device("meta"):
        return shrink(config, Shrinking(shapes=shapes_of(cls._from_config(config))))


@pytest.mark.parametrize(
    ("numbers", "left"),
    [
        ([3, 8, 13], [1]),  # the small model keeps one
        ([1, 8, 16], [1]),  # 16: the states after the last layer
        ([0, 1], [0, 1]),
        ([1, 2, 3, 6], [1, 2, 3, 6]),  # pooling scales of an image model
        ([3, 8, 17], [3, 8, 17]),  # there are 16 layers
        ([8, 3], [8, 3]),
        ([3, 3, 8], [3, 3, 8]),
        ([-2, 8], [-2, 8]),
        ([True, 8], [True, 8]),
        (["3", "8"], ["3", "8"]),
        ([], []),
    ],
)
def test_list_of_layer_numbers_is_known_by_content(numbers: list, left: list) -> None:
    config = tf.LlamaConfig(num_hidden_layers=16, odd=numbers)
    small = shrunk(tf.LlamaForCausalLM, config)
    assert small.num_hidden_layers == 2
    assert small.odd == left


def test_kernel_sizes_are_not_layer_numbers() -> None:
    """The sizes 3, 7, 11 ascend and lie below 16, the number of layers, but are kernel widths."""
    config = tf.VitsConfig()
    small = shrunk(tf.VitsModel, config)
    assert small.posterior_encoder_num_wavenet_layers < max(config.resblock_kernel_sizes)
    assert small.resblock_kernel_sizes == config.resblock_kernel_sizes


def test_listed_layers_are_among_the_first() -> None:
    """Without this rule a twin would need four layers to include a cross-attention layer."""
    config = tf.models.mllama.MllamaTextConfig()
    assert config.cross_attention_layers[0] == 3
    twin = make_twin(tf.MllamaForCausalLM, config)
    assert [type(layer).__name__ for layer in twin.model.model.layers] == [
        "MllamaSelfAttentionDecoderLayer",
        "MllamaCrossAttentionDecoderLayer",
    ]


TABLES = [
    (tf.GPT2LMHeadModel, tf.GPT2Config(n_positions=2048), {"n_positions": LONG}),
    (tf.BartModel, tf.BartConfig(), {"max_position_embeddings": LONG}),  # a table of LONG + 2 rows
    (tf.LayoutLMModel, tf.LayoutLMConfig(), {"max_position_embeddings": LONG, "max_2d_position_embeddings": LONG}),
    (tf.BarkSemanticModel, tf.BarkSemanticConfig(), {"block_size": LONG}),  # the table is called a block
    (
        tf.LongformerModel,
        tf.LongformerConfig(),
        {"attention_window": [4, 4]},
    ),  # windows as wide as the table
    (tf.LlamaForCausalLM, tf.LlamaConfig(max_position_embeddings=4096), {"max_position_embeddings": 4096}),  # no table
]


@pytest.mark.parametrize(("cls", "config", "wanted"), TABLES, ids=[cls.__name__ for cls, _, _ in TABLES])
def test_long_tables_are_shortened_where_there_are_any(
    cls: type[tf.PreTrainedModel], config: tf.PreTrainedConfig, wanted: dict[str, int]
) -> None:
    twin = make_twin(cls, config)
    assert {name: getattr(twin.model.config, name) for name in wanted} == wanted
    tables = [module for module in twin.model.modules() if isinstance(module, torch.nn.Embedding)]
    assert max(table.num_embeddings for table in tables) <= LONG + 2


def test_token_windows_are_shortened_patch_windows_stay() -> None:
    assert shrink(tf.GPTNeoConfig()).window_size == shrink(tf.MistralConfig()).sliding_window == 4
    assert shrink(tf.MistralConfig(patch_size=32)).sliding_window == 4  # images in a decoder of tokens
    assert shrink(tf.DeepseekV32Config()).index_topk == shrink(tf.DogeConfig()).keep_window_size == 4
    vision = tf.models.qwen2_5_vl.Qwen2_5_VLConfig().vision_config
    assert shrink(vision).window_size == vision.window_size == 112


def test_heads_of_indexers_stay() -> None:
    small = shrink(tf.GlmMoeDsaConfig(), Shrinking(heads=3))
    assert (small.num_attention_heads, small.index_n_heads) == (8, 32)


def test_window_that_sizes_parameters_stays() -> None:
    """Granite's speech model has 15 // 5 queries per window. In a text model no tensor shape depends on the window."""
    config = tf.GraniteSpeechConfig(window_size=15, downsample_rate=5)
    assert first_choice(tf.GraniteSpeechForConditionalGeneration, config).shapes.windows
    config = tf.MistralConfig(sliding_window=9)
    choice = first_choice(tf.MistralForCausalLM, config)
    assert shrink(config, choice).sliding_window == 4
