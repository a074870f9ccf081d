"""The tensors of a quantized checkpoint as those of a plain one.

transformers builds the model as if it were plain; its weights become expressions of stored tensors. A rank that reads
its slice reads the numbers and scales of that slice. A weight in one of the schemes of `quantize=` stays as it is.
Nothing here computes with other schemes: they become high precision, if the caller allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parallelformers_ng.checkpoint.encoded import stored_encoding
from parallelformers_ng.checkpoint.formats.bitsandbytes import bitsandbytes
from parallelformers_ng.checkpoint.formats.gptq import awq, gptq
from parallelformers_ng.checkpoint.formats.scaled import compressed_tensors, fp8, mxfp4
from parallelformers_ng.checkpoint.formats.stored_tensors import StoredTensors
from parallelformers_ng.checkpoint.formats.torchao import torchao
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.nodes import Node
from parallelformers_ng.errors import UnsupportedModelError

_FORMATS: dict[str, Callable[[StoredTensors], dict[str, Node]]] = {
    "fp8": fp8,
    "compressed-tensors": compressed_tensors,
    "mxfp4": mxfp4,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "gptq": gptq,
    "awq": awq,
}


def unpacked(stored: StoredTensors) -> dict[str, LazyTensor]:
    """Return the tensors of a quantized checkpoint under the names, and with the numbers, that a plain one would have.

    Raises:
        UnsupportedModelError: the format is not known, or would have to be put in high precision.
        CheckpointError: scales are missing, or are not those of their weight; it is named.
    """
    said = stored.quantization
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    method = getattr(method, "value", method)  # of transformers' own kind
    if method is None:
        raise stored.damaged(f"its configuration says {said} of how its weights are quantized, and not by what method")
    if method not in _FORMATS:
        raise UnsupportedModelError(
            f"{stored.where} is quantized by {method}, which cannot be cut yet; those of {', '.join(_FORMATS)} can."
            " Give a checkpoint in high precision, and quantize='int8' for few bits"
        )
    try:
        weights = _FORMATS[method](stored)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # anything may be written there
        raise stored.damaged(
            f"its configuration says {said} of its weights, which makes no sense: {error!r}"
        ) from error
    for name, node in weights.items():
        if stored_encoding(node) is None and not stored.dequantize:
            raise UnsupportedModelError(
                f"{stored.where} is quantized by {method}, and no kernel or module here, on any device, computes with"
                f" {name} as it is stored: {stored.reasons[name]}. quantize={{'dequantize': True}} puts it in high"
                " precision on the ranks, and with 'scheme': 'int8' in 8 bits"
            )
    return {**stored.state, **{name: LazyTensor(node) for name, node in weights.items()}}
