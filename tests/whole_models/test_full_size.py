"""Tests that rules proven on tiny models apply at full size: real default configurations are planned on `meta`."""

from __future__ import annotations

import pytest
import transformers as tf
from torch import nn

from parallelformers_ng.autopolicy.config_numbers import absent_kinds
from parallelformers_ng.autopolicy.twin_making import make_twin
from parallelformers_ng.sharding.structure import places
from tests.zoo.full_size import measure

MIXTURES = ["jetmoe", "switch_transformers"]
LATER_LAYERS = ["sam3_lite_text_text_model", "lfm2_moe"]
TOWERS = ["janus", "qwen2_audio", "lfm2_vl", "granite_speech"]
LONG = ["granite_speech5_ctc", "bridgetower", "nllb-moe", "step3p7", "ernie4_5_vl_moe", "evolla", "cohere_asr"]
"""Model types whose plans take four to ten seconds each."""
RUN = [*MIXTURES, *LATER_LAYERS, *TOWERS, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]


@pytest.mark.parametrize("model_type", RUN)
def test_real_configurations_are_cut_evenly(model_type: str) -> None:
    measured = measure(model_type, (2, 8))
    assert measured["status"] == "planned", measured
    assert min(measured["cut"].values()) >= 0.95, measured
    assert max(measured["fullest"].values()) <= 1.2, measured


@pytest.mark.parametrize(
    ("cls", "config", "kind"),
    [
        (tf.NllbMoeModel, tf.NllbMoeConfig(), "NllbMoeDecoderLayer"),
        (tf.Lfm2MoeForCausalLM, tf.Lfm2MoeConfig(layer_types=["conv", "full_attention"] * 16), "Lfm2MoeDecoderLayer"),
    ],
)
def test_twin_shows_every_kind_of_layer(cls: type, config: tf.PreTrainedConfig, kind: str) -> None:
    """In some models every fourth layer has experts, or every layer after the first two. A twin of two layers would
    have none."""
    twin = make_twin(cls, config).model
    layers = [m for m in twin.modules() if type(m).__name__ == kind]
    assert {any("experts" in name for name, _ in layer.named_modules()) for layer in layers} == {True, False}


def test_absent_kinds_are_found_by_their_parameters() -> None:
    def layers(*widths: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4, bias=bool(w)) for _ in range(2))) for w in widths))

    assert absent_kinds(layers(0, 0, 1), layers(0, 0)) == {("Sequential", frozenset({"*.weight", "*.bias"})): 2}
    assert not absent_kinds(layers(0, 1, 1), layers(1, 0))


def test_blocks_in_any_container_have_own_places() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

    for container in (nn.Sequential(Block(), Block()), nn.ModuleDict({"a": Block(), "b": Block()})):
        places_by_name = places(nn.ModuleDict({"blocks": container}))
        names = [name for name in places_by_name if name.endswith(".fc")]
        assert {(places_by_name[name].block, places_by_name[name].path) for name in names} == {("Block", "fc")}
