"""A slice of the zoo (`make zoo` runs all of it): model types of every kind, cut as `parallelize` would cut them."""

from __future__ import annotations

import pytest

from tests.zoo.judge import judge

WRITTEN = ["llama", "bert", "t5", "gpt2", "bart", "vit", "wav2vec2", "clip"]
PROVEN = [
    "granite", "glm", "codegen", "biogpt", "mamba", "mpt", "gpt_oss", "longformer", "canine", "cpmant", "dinov2",
    "beit", "hiera", "convnext", "imagegpt", "aimv2", "seamless_m4t",
]  # fmt: skip


@pytest.mark.parametrize("model_type", WRITTEN + PROVEN)
def test_a_model_type_cut_on_two_ranks_gives_what_it_gives_whole(model_type: str) -> None:
    (verdict,) = judge(model_type, (2,))
    assert verdict["status"] == "equal", verdict
    assert verdict["share"] >= 0.8, verdict
    assert ("written" in verdict["source"]) == (model_type in WRITTEN)
