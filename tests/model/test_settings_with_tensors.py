"""Tests configurations with tensors and arrays in lists and dictionaries."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from parallelformers_ng import parallelize

IDS = torch.tensor([[1, 5, 9]])


class Weighing(GPT2LMHeadModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.config.weights["of"][0].sum() * float(self.config.more[0].sum())
        return output


def _made() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=0, eos_token_id=0)
    config.weights, config.more = {"of": [torch.tensor([1.0, 2.0])]}, [np.array([1.0, 0.5])]
    return Weighing(config).eval()


def test_tensor_in_a_list_of_the_configuration(groups) -> None:
    plain = _made()
    model = parallelize(_made(), workers=groups(2))
    try:
        for factor in (1, 3):
            for each in (plain, model):
                each.config.weights["of"][0].mul_(factor)
                each.config.more[0] *= factor
            for _ in range(2):
                with torch.no_grad():
                    assert torch.allclose(model(IDS).logits, plain(IDS).logits, atol=1e-5)
    finally:
        model.deparallelize()


async def _await(model: Any, inputs: dict[str, Any]) -> Any:
    return await model.agenerate(**inputs)


def _series() -> dict[str, torch.Tensor]:
    past = {"past_values": torch.randn(1, 10), "past_time_features": torch.randn(1, 10, 1)}
    return {**past, "past_observed_mask": torch.ones(1, 10), "future_time_features": torch.randn(1, 4, 1)}


SERIES = {
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_parallel_samples": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2,
}  # fmt: skip
PATCHES = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4}
PREDICTORS: dict[str, dict[str, Any]] = {
    "Autoformer": {**SERIES, "label_length": 4, "moving_average": 3},
    "Informer": SERIES,
    "TimeSeriesTransformer": SERIES,
    "PatchTST": {**PATCHES, "d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16},
    "PatchTSMixer": {**PATCHES, "d_model": 8, "num_layers": 1, "loss": "nll"},
}


@pytest.mark.parametrize("name", ["Autoformer", *(pytest.param(e, marks=pytest.mark.slow) for e in [*PREDICTORS][1:])])
def test_agenerate_of_a_class_that_takes_no_streamer(name: str, groups) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**PREDICTORS[name])
    made = getattr(transformers, f"{name}ForPrediction")(config).eval()
    model = parallelize(made, workers=groups(2))
    try:
        inputs = {"past_values": torch.randn(1, 16, 2)} if name.startswith("Patch") else _series()
        torch.manual_seed(1)
        wanted = model.generate(**inputs).sequences
        torch.manual_seed(1)
        assert torch.equal(asyncio.run(_await(model, inputs)).sequences, wanted)
    finally:
        model.deparallelize()
