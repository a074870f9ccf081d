"""Whether layers that are known by their code mean in the installed transformers what the kernels compute. A release
that nothing is known of may give old names a new meaning; then its code does the work, and the numbers stay right."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from parallelformers_ng.kernels.recognition import modelling

_TOLERANCE = 1e-4
_logger = logging.getLogger(__name__)


def agrees(families: Iterable[str], fused: Callable[[nn.Module], object]) -> bool:
    """Compare a step of a small model of each family, with random numbers in fp32, with itself in the kernels.

    Args:
        families: as the classes of transformers are called, "Llama".
        fused: lets the kernels serve a module.
    """
    for family in families:
        try:
            distance = _distance(family, fused)
        except Exception as error:
            _logger.warning("%s layers are left to transformers: %s: %s", family, type(error).__name__, error)
            return False
        if not distance < _TOLERANCE:
            _logger.warning("%s layers are left to transformers: the kernels differ by %.1e", family, distance)
            return False
    return True


@torch.inference_mode()
def _distance(family: str, fused: Callable[[nn.Module], object]) -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
        lengths = {"num_hidden_layers": 2, "vocab_size": 8}
        config = modelling(family, "Config")(**sizes, **lengths, head_dim=4, pad_token_id=0)
        config._attn_implementation, config._experts_implementation = "sdpa", "eager"
        model = modelling(family, "Model")(config).float().eval()
        for parameter in model.parameters():
            parameter.normal_()
        embedded, cached = torch.randn(2, 1, 8), torch.randn(2, 2, 2, 1, 3, 4)  # of each layer: keys and values
    of_kernels = copy.deepcopy(model)
    fused(of_kernels)

    def run(model: Any) -> Tensor:
        cache = DynamicCache()
        for index, (keys, values) in enumerate(cached):
            cache.update(keys, values, index)
        output = model(inputs_embeds=embedded, past_key_values=cache).last_hidden_state
        parts = [output, *(part for layer in cache.layers for part in (layer.keys, layer.values))]
        return torch.cat([part.flatten() for part in parts])

    wanted = run(model)
    return ((run(of_kernels) - wanted).norm() / wanted.norm()).item()
