"""Changes the classes of a rank's modules, so that the kernels compute instead of the modules."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from parallelformers_ng.kernels.decoder_layer import FusedDecoderLayer
from parallelformers_ng.kernels.decoder_stack import DecoderStack, LayersAsOne, with_layers_as_one
from parallelformers_ng.kernels.layer_halves import Step
from parallelformers_ng.kernels.operators import FusedRMSNorm, StreamingLinear, StreamingQuantizedLinear, _decode
from parallelformers_ng.kernels.recognition import (
    ATTENTIONS,
    LAYERS,
    agree,
    is_known,
    mixed,
    modelling,
)
from parallelformers_ng.sharding.cache_names import CACHE
from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.quantized import QuantizedLinear, hold


def install(model: nn.Module, left: Collection[str] = ()) -> None:
    """Change the classes of modules that the C kernels can compute, if the kernels were built. The kernels use as many
    threads as torch.

    With several threads, torch computes the linear layers of models that `is_known` does not recognise, because torch's
    threads do not sleep between two layers. The kernels still compute quantized layers of these models, because torch
    would have to dequantize the weights first.

    Args:
        model: model of a rank; its tensors may still be missing.
        left: paths of modules that keep their class, because other code reads their parameters as attributes.
    """
    if _decode is not None:
        _decode.use_threads(torch.get_num_threads())
        _change(model, left)


def compare_before_forks() -> None:
    """Compare the C kernels with transformers once, for all ranks that this process will fork.

    The comparison starts no thread, which a fork would lose, and does not initialize CUDA, which a fork could not use.
    """
    if _decode is not None:
        threads, is_capturing = torch.get_num_threads(), torch.cuda.is_current_stream_capturing
        torch.set_num_threads(1)
        # transformers' mask functions call this function, and torch's own initializes the CUDA driver even on the CPU.
        torch.cuda.is_current_stream_capturing = lambda: False
        try:
            layers_agree()
        finally:
            torch.cuda.is_current_stream_capturing = is_capturing
            torch.set_num_threads(threads)


def forget(model: nn.Module) -> None:
    """Drop what the kernels know about a model's modules, because attributes of the modules have changed."""
    Step.forget()
    for module in model.modules():
        if isinstance(module, (FusedDecoderLayer, LayersAsOne)):
            module.forget()


# `checked` prevents a recursion, because the comparison in `layers_agree` calls `_change`, too.
def _change(model: nn.Module, left: Collection[str] = (), checked: bool = False) -> None:
    one_by_one = torch.get_num_threads() == 1 or any(is_known(module, "Model") for module in model.modules())
    for path, module in model.named_modules():
        cls: type = type(module)
        if path in left:
            continue
        # Under weight_norm, for example, a hook computes the weight, so the layer has no parameter `weight`.
        if cls is nn.Linear and one_by_one and "weight" in module._parameters:
            module.__class__ = StreamingLinear
        elif cls is QuantizedLinear:
            module.__class__ = StreamingQuantizedLinear
        elif is_known(module, "RMSNorm") and isinstance(module._parameters.get("weight"), Tensor):
            module.__class__ = mixed(FusedRMSNorm, cls)
        elif is_known(module, "Layer") and (checked or layers_agree()):
            module.__class__ = mixed(FusedDecoderLayer, cls)
        elif is_known(module, "Model") and type(module.layers) is nn.ModuleList and (checked or layers_agree()):
            module.layers.__class__ = DecoderStack
            module.__class__ = with_layers_as_one(cls)


@functools.cache
def layers_agree() -> bool:
    """Compare the C kernels with the installed transformers on small random models. Log a warning if they differ.

    The comparison takes a tenth of a second; `compare_before_forks` makes it once for all ranks.
    """
    models = [*((family, False) for family in dict.fromkeys((*ATTENTIONS, *LAYERS))), (LAYERS[0], True)]
    return all(agree(f"{model[0]} layers are", functools.partial(_outputs, *model)) for model in models)


def _outputs(family: str, quantized: bool) -> tuple[Tensor, Tensor]:
    """Run one step of a small random fp32 model by the kernels, and by transformers; return both outputs, with the
    caches. With `quantized`, the linear layers have int8 and int4 weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would also seed CUDA
        width = 16 if quantized else 4  # int4 groups have 32 inputs, so a hidden size is at least 32
        sizes = {"hidden_size": 2 * width, "intermediate_size": 4 * width, "head_dim": width}
        counts = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 8}
        config = modelling(family, "Config")(**sizes, **counts, pad_token_id=0)
        config._attn_implementation, config._experts_implementation = "sdpa", "eager"
        model = modelling(family, "Model")(config).float().eval()
        for parameter in model.parameters():
            parameter.normal_()
        embedded, cached = torch.randn(2, 1, 2 * width), torch.randn(2, 2, 2, 1, 3, width)  # keys, values of 2 layers
    if quantized:
        for number, linear in enumerate([module for module in model.modules() if type(module) is nn.Linear]):
            encoding = Encoding("int4", -1, 32) if number % 2 else Encoding("int8", -1, linear.in_features)
            hold(linear, "weight", encoding, *encoding.encode(linear.weight), torch.float32)
    of_kernels = copy.deepcopy(model)
    _change(of_kernels, checked=True)

    def run(model: Any) -> Tensor:
        cache = DynamicCache()
        for index, (keys, values) in enumerate(cached):
            cache.update(keys, values, index)
        output = model(inputs_embeds=embedded, **{CACHE: cache}).last_hidden_state
        parts = [output, *(part for layer in cache.layers for part in (layer.keys, layer.values))]
        return torch.cat([part.flatten() for part in parts])

    return run(of_kernels), run(model)
