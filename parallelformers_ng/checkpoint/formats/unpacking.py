"""Converts the tensors of a quantized checkpoint to the names and shapes of a plain checkpoint.

transformers then builds a plain model, whose weights are nodes that read the stored tensors. A rank that reads its
slice of a weight reads only the numbers and scales of that slice. A weight stays quantized if `quantize=` has a scheme
of the same format. A weight in another format becomes high precision if the caller allows dequantization.
"""

from __future__ import annotations

from collections.abc import Mapping

from parallelformers_ng.checkpoint.encoded import stored_encoding
from parallelformers_ng.checkpoint.formats.bitsandbytes import bitsandbytes
from parallelformers_ng.checkpoint.formats.gptq import awq, gptq
from parallelformers_ng.checkpoint.formats.scaled import compressed_tensors, fp8, mxfp4, torchao
from parallelformers_ng.checkpoint.formats.stored_tensors import StoredTensors
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.errors import UnsupportedModelError

# The name of each reader is the `quant_method` that it reads.
_READERS = (fp8, compressed_tensors, mxfp4, bitsandbytes, torchao, gptq, awq)
_FORMATS = {reader.__name__.replace("_", "-"): reader for reader in _READERS}


def unpacked(stored: StoredTensors) -> dict[str, LazyTensor]:
    """Convert a quantized checkpoint to lazy tensors with the names, shapes and values of an unquantized checkpoint."""
    quantization = stored.quantization
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    method = getattr(method, "value", method)  # transformers may have put an enumeration member in place of the text
    if method is None:
        raise stored.damaged(f"its quantization_config {quantization} has no quant_method")
    if method not in _FORMATS:
        raise UnsupportedModelError(
            f"{stored.where} is quantized by {method}, which is not supported; supported methods:"
            f" {', '.join(_FORMATS)}. Pass a checkpoint in high precision, and quantize='int8' to quantize it"
        )
    try:
        weights = _FORMATS[method](stored)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # a setting is missing or wrong
        raise stored.damaged(f"its quantization_config {quantization} is invalid: {error!r}") from error
    for name, node in weights.items():
        if stored_encoding(node) is None and not stored.dequantize:
            raise UnsupportedModelError(
                f"{stored.where} is quantized by {method}, and no kernel or module can compute with {name} as it is"
                f" stored: {stored.reasons[name]}. Pass quantize={{'dequantize': True}} for high precision on the"
                " ranks, or quantize={'scheme': 'int8', 'dequantize': True} for 8 bits"
            )
    return {**stored.state, **{name: LazyTensor(node) for name, node in weights.items()}}
