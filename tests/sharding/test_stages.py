"""Tests the division of models into stages of consecutive layers, and device maps made from stages."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from parallelformers_ng import balanced_device_map
from parallelformers_ng.errors import ParallelError, PlacementError
from parallelformers_ng.sharding.stages import find_stages, tensors_of, units
from parallelformers_ng.sharding.tensors import all_tensors
from tests.zoo.families import ALL

SHAPES: list[Any] = [
    tf.LlamaConfig(num_key_value_heads=8),
    tf.LlamaConfig(tie_word_embeddings=True, vocab_size=128256, hidden_size=2048, num_hidden_layers=16),
    tf.Qwen3Config(num_hidden_layers=28),
    tf.MixtralConfig(num_hidden_layers=9),
    tf.GPT2Config(),
    tf.GPT2Config(n_layer=48, n_embd=1600, n_head=25),
    tf.BloomConfig(n_layer=24, hidden_size=1024, n_head=16),
    tf.T5Config(num_layers=8, num_decoder_layers=12),
    tf.BartConfig(),
    tf.WhisperConfig(),
    tf.BertConfig(),
    tf.DebertaV2Config(),
    tf.ViTConfig(),
    tf.SwinConfig(),
    tf.Wav2Vec2Config(),
    tf.LlavaConfig(),
    tf.Gemma3Config(),
    tf.MambaConfig(num_hidden_layers=24),
    tf.AlbertConfig(),
    tf.FalconConfig(num_hidden_layers=12),
]


@pytest.mark.parametrize("config", SHAPES, ids=lambda config: config.model_type)
def test_fullest_device_is_within_one_layer_of_ideal(config: Any) -> None:
    with torch.device("meta"):
        model = next(
            auto.from_config(config)
            for auto in (tf.AutoModelForCausalLM, tf.AutoModelForSeq2SeqLM, tf.AutoModel)
            if type(config) in auto._model_mapping
        )
    whole = {id(tensor): tensor.nbytes for tensor in all_tensors(model).values()}
    for ratio in ((1, 1), (1, 1, 1), (0.5, 1, 1, 1), (1, 3)):
        device_map = balanced_device_map(model, len(ratio), ratio)
        device_tensors: dict[Any, dict[int, int]] = {device: {} for device in range(len(ratio))}
        for unit, device in device_map.items():
            device_tensors[device].update({id(tensor): tensor.nbytes for tensor in tensors_of(model, unit).values()})
        assert sum(len(mine) for mine in device_tensors.values()) == len(whole), (
            "each tensor is on one device, tied tensors too"
        )
        layer = max(sum(tensor.nbytes for tensor in tensors_of(model, unit).values()) for unit in device_map)
        for device, part in enumerate(ratio):
            ideal = sum(whole.values()) * part / sum(ratio)
            assert sum(device_tensors[device].values()) <= ideal + layer, (ratio, device)


@pytest.mark.parametrize("case", ALL[::9], ids=lambda case: case.name)
def test_every_tensor_is_in_one_unit(case: Any) -> None:
    model = case.make()
    tensors = [id(tensor) for unit in units(model) for tensor in tensors_of(model, unit).values()]
    assert set(tensors) == {id(tensor) for tensor in all_tensors(model).values()}
    names = getattr(model, "_no_split_modules", None) or ()
    for path, module in model.named_modules():
        if type(module).__name__ in names and path:
            assert sum(f"{unit}.".startswith(f"{path}.") for unit in units(model)) <= 1


def test_stages_are_optimal() -> None:
    """The stages are compared with every other division of a few parts into consecutive parts."""
    draw = random.Random(0)
    for _ in range(200):
        count, stages = draw.randint(3, 8), draw.randint(1, 3)
        sizes = [{draw.choice((number, "tied")): draw.randint(1, 9)} for number in range(count)]
        for part in sizes:
            part.update({key: 5 for key in part if key == "tied"})
        shares = [draw.choice((0.5, 1, 2)) for _ in range(stages)]

        def fullest(bounds: tuple[int, ...], sizes: Any = sizes, shares: Any = shares) -> float:
            runs = itertools.pairwise((0, *bounds, len(sizes)))
            loads = [
                sum({k: v for part in sizes[start:stop] for k, v in part.items()}.values()) for start, stop in runs
            ]
            return max((2 + load) / share for load, share in zip(loads, shares, strict=True))

        found_stages = find_stages(sizes, shares, everywhere=2)
        best = min(map(fullest, itertools.combinations(range(1, count), stages - 1)))
        assert fullest(tuple(stop for _, stop in found_stages[:-1])) == pytest.approx(best)


def test_a_device_map_is_taken_by_from_pretrained(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
    config = tf.LlamaConfig(num_hidden_layers=5, tie_word_embeddings=True, **sizes)
    model = tf.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    where = balanced_device_map(config, 2, ratio=(1, 2), device_ids=["disk", "cpu"])
    assert {"disk", "cpu"} == set(where.values())
    assert where["lm_head"] == where["model.embed_tokens"], "tied weights are one tensor"
    again = tf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=where, offload_folder=str(tmp_path / "offload")
    )
    ids = torch.tensor([[5, 9, 17]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_caches_are_counted() -> None:
    """Keys and values take more bytes than the embedding, so more layers fit on the device with the embedding."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512}
    config = tf.LlamaConfig(num_hidden_layers=8, tie_word_embeddings=True, **sizes)
    plain = list(balanced_device_map(config, 2).values()).count(0)
    cached = list(balanced_device_map(config, 2, batch=64, length=4096).values()).count(0)
    assert plain < cached
    assert set(balanced_device_map(config, 2, device_ids=[3, 7]).values()) == {3, 7}


def test_impossible_device_maps_are_refused() -> None:
    config = tf.LlamaConfig(num_hidden_layers=2)
    with pytest.raises(PlacementError, match="9 stages need 9 parts, but the model has only 6"):
        balanced_device_map(config, 9)
    with pytest.raises(PlacementError, match="device_ids has 3"):
        balanced_device_map(config, 2, device_ids=[0, 1, 2])
    with pytest.raises(ParallelError, match="ratio has 2 numbers"):
        balanced_device_map(config, 3, ratio=(1, 2))
    with pytest.raises(PlacementError, match="num_devices is 0"):
        balanced_device_map(config, 0)
