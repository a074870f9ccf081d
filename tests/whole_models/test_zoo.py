"""Tests a part of the zoo (`make zoo` runs the whole): model types of every kind, sharded as `parallelize` does."""

from __future__ import annotations

import pytest

from tests.zoo.judge import judge

WRITTEN = [
    "llama", "bert", "t5", "gpt2", "bart", "vit", "wav2vec2", "clip", "whisper", "longformer", "granite", "mamba",
    "mpt", "gpt_oss", "dinov2", "timesfm2_5", "deepseek_ocr2",
    "rt_detr", "d_fine", "deimv2", "longcat_flash",
]  # fmt: skip
OTHERS = ["codegen", "beit", "convnext", "levit", "imagegpt", "dia"]
LONG = {"timesfm2_5", "deepseek_ocr2", "dia", "d_fine", "deimv2", "levit"}
"""Model types that take three to ten seconds each."""
DECODING = {"llama", "t5", "gpt2", "bart", "granite", "mpt"}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in WRITTEN + OTHERS]
)
def test_model_type_on_two_ranks_equals_whole(model_type: str) -> None:
    (verdict,) = judge(model_type, (2,))
    assert verdict["status"] == "equal", verdict
    assert verdict["share"] >= 0.8, verdict
    assert model_type not in WRITTEN or verdict["source"] == "written"
    if model_type in DECODING:
        assert {"forward", "greedy", "beam", "sampled"} <= set(verdict["compared"].split(", ")), verdict


@pytest.mark.parametrize("model_type", ["gpt2", "granite", "dinov2"])
def test_model_type_on_four_ranks_equals_whole(model_type: str) -> None:
    (verdict,) = judge(model_type, (4,))
    assert verdict["status"] == "equal", verdict
    assert verdict["share"] >= 0.8, verdict


@pytest.mark.parametrize(
    "model_type", ["llama", "t5", "opt", "speech_to_text", pytest.param("qwen2_moe", marks=pytest.mark.slow)]
)
def test_model_type_in_unproven_sizes_equals_whole(model_type: str) -> None:
    """The models have six heads on three and five ranks, odd widths, and one more layer than the twin."""
    for verdict in judge(model_type, (3, 5), varied=True):
        assert verdict["status"] == "equal", verdict
        assert verdict["share"] >= 0.8, verdict
