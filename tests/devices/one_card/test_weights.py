"""Tests where weights of ranks that share one card come from, in which form they are, and where they go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallelformers_ng import parallelize, plan, save_sharded
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.sharding.encoding import Encoding
from tests.devices.one_card.expected import greedy, without_ties
from tests.devices.one_card.place import Place, quick, slow
from tests.helpers.patience import await_end
from tests.zoo.decoders import decoder

TOKENS = 8
GROUPS = {"int8": None, "int4": 8, "fp8": None}
"""Scheme → inputs that share a scale; None: all inputs of an output."""


def _llama(layers: int = 2) -> Any:
    return decoder("Llama", layers=layers, width=80)


def _same_weights(model: nn.Module, whole: nn.Module) -> bool:
    state = model.state_dict()
    return all(torch.equal(state[name], tensor) for name, tensor in whole.state_dict().items())


@slow
@pytest.mark.parametrize("scheme", GROUPS)
def test_quantized_weights(scheme: str, place: Place) -> None:
    """The plain model has the same weights, quantized and dequantized again."""
    whole = _llama()
    for path, layer in whole.named_modules():
        if type(layer) is nn.Linear and path != "lm_head":
            encoding = Encoding(scheme, -1, GROUPS[scheme] or layer.in_features)
            layer.weight.data = encoding.decode(*encoding.encode(layer.weight.detach()), layer.weight.dtype)
    inputs, want = without_ties(whole, TOKENS)
    quantize = {"scheme": scheme, "group": GROUPS[scheme]}
    with parallelize(_llama(), workers=place.group(2), quantize=quantize) as model:
        for _ in range(3):
            assert torch.equal(greedy(model, inputs, TOKENS), want)


@quick
def test_weights_return_to_the_caller(place: Place) -> None:
    whole = _llama()
    inputs, want = without_ties(whole, TOKENS)
    model = parallelize(_llama(), workers=place.group(2))
    assert torch.equal(greedy(model, inputs, TOKENS), want)
    assert _same_weights(model, whole)
    model.deparallelize()
    assert _same_weights(model, whole)
    assert torch.equal(greedy(model, inputs, TOKENS), want)


@slow
def test_checkpoint_is_read_and_written(tmp_path: Path, place: Place) -> None:
    """Two ranks read an ordinary checkpoint and write a sharded one; three ranks read the sharded one."""
    whole = _llama()
    whole.save_pretrained(tmp_path / "whole")
    inputs, want = without_ties(whole, TOKENS)
    with parallelize(tmp_path / "whole", workers=place.group(2)) as model:
        assert torch.equal(greedy(model, inputs, TOKENS), want)
        save_sharded(model, tmp_path / "sharded")
        model.save_pretrained(tmp_path / "again")
    for folder, ranks in (("sharded", 3), ("again", 2)):
        model = parallelize(tmp_path / folder, workers=place.group(ranks))
        assert torch.equal(greedy(model, inputs, TOKENS), want)
        model.deparallelize()
        assert _same_weights(model, whole)


@slow
@pytest.mark.parametrize("place_of_rest", ["cpu", "disk"])
def test_layers_that_do_not_fit_are_loaded(place_of_rest: str, tmp_path: Path, place: Place) -> None:
    """A third of the weights stay on the device."""
    whole = _llama(layers=6)
    inputs, want = without_ties(whole, TOKENS)
    room = max(plan(_llama(layers=6), 2).bytes_per_rank) // 3 + 30_000
    rest = {"cpu": "1GiB" if place_of_rest == "cpu" else 0}
    fit = {"max_memory": {0: 2 * room, **rest}, "offload_folder": str(tmp_path)}
    model = parallelize(_llama(layers=6), 2, workers=place.workers(2), fit=fit)
    pids = deployment_of(model).pids
    with model:
        for _ in range(2):
            assert torch.equal(greedy(model, inputs, TOKENS), want)
        assert _same_weights(model, whole)
    await_end(*pids)
