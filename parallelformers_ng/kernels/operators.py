"""Runs single operators in C (`_decode.c`). An operator reads weights, keys and values once, at the full speed of the
memory, in one call instead of several calls of torch.

Operators of torch run instead if gradients, autocast or `torch.compile` are on, and for data types that the kernels
cannot read. The kernels add in another order than torch, so results may differ in the last bits.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from parallelformers_ng.sharding.encoding import SCALE
from parallelformers_ng.sharding.quantized import QuantizedLinear

try:
    from parallelformers_ng.kernels import _decode
except ImportError as error:  # the C kernels were not built, for example without a compiler
    _decode = None  # type: ignore[assignment]
    logging.getLogger("parallelformers_ng").debug("torch computes decode steps without C kernels: %s", error)

KINDS = {torch.float32: 0, torch.bfloat16: 1}
_HAS_TILES, _HAS_PAIRS = (getattr(_decode, name, False) for name in ("HAS_TILES", "HAS_PAIRS"))
# Whether the processor multiplies bfloat16, but the compiler of this package could not. torch is then twice as fast.
_LACKS_BF16 = torch.cpu._is_avx512_bf16_supported() and not (_HAS_TILES or _HAS_PAIRS)
# A linear layer with more input rows runs in torch, which is then as fast or faster. On processors with bfloat16
# instructions (AMX, AVX512-BF16) the kernel is as fast as torch, and the limit only bounds the kernel's memory.
MAX_ROWS = {
    torch.float32: 64 if torch.cpu._is_avx512_supported() else 16,
    torch.bfloat16: 4 if _LACKS_BF16 else 1024 if _HAS_TILES else 2048 if _HAS_PAIRS else 32,
}
# A quantized linear layer with more input rows dequantizes its weight and runs in torch.
MAX_ROWS_OF_INTEGERS = {torch.float32: 16, torch.bfloat16: 32}
# The C function prefetches the dictionaries, because a decode step has displaced them from the processor's caches.
_still_contain: Callable[..., bool] = getattr(
    _decode, "still_contain", lambda *lists: all(map(operator.is_, map(dict.get, *lists[:2]), lists[2]))
)
_code_is_stock = True
_NO_MASK, _BOOL_MASK, _ADDED_MASK = range(3)


class StreamingLinear(nn.Linear):
    """`nn.Linear` that multiplies up to `MAX_ROWS` input rows in C. The weight may be a slice of a wider matrix.

    torch multiplies larger inputs, inputs on other devices or of data types that are not in `KINDS`, and all inputs
    while `may_serve()` is False.
    """

    def forward(self, input: Tensor) -> Tensor:
        # Read `_parameters`, because nn.Module.__getattr__ is slow, and this line runs for every matrix and token.
        weight = self._parameters["weight"]
        input = _dense(input)
        if (
            weight is None
            or not _fits(input, weight)
            or not 0 < input.numel() <= MAX_ROWS[input.dtype] * weight.shape[1]
            or input.shape[-1] != weight.shape[1]
            or weight.stride(1) != 1
        ):
            return super().forward(input)
        return _multiply(self, input)


class StreamingQuantizedLinear(QuantizedLinear):
    """A quantized linear layer that multiplies up to `MAX_ROWS_OF_INTEGERS` input rows in C, directly by the quantized
    weight.

    For other inputs, `QuantizedLinear` dequantizes the weight, and torch multiplies.
    """

    def forward(self, input: Tensor) -> Tensor:
        _, inputs = shape_of(self)
        input = _dense(input)
        if (
            not self.is_read
            or data_type_of(self) is not input.dtype
            or not may_serve()
            or not 0 < input.numel() <= MAX_ROWS_OF_INTEGERS[input.dtype] * inputs
            or input.shape[-1] != inputs
            or not input.is_cpu
        ):
            return super().forward(input)
        return _multiply(self, input)

    @property
    def is_read(self) -> bool:
        (encoding, dtype), scales = self.encodings["weight"], self._parameters["weight" + SCALE]
        assert scales is not None
        if dtype not in KINDS or not matrix_of(self).is_contiguous() or not scales.is_contiguous():
            return False
        whole_groups = encoding.kind == "int8" or shape_of(self)[1] == encoding.block * scales.shape[1]
        return whole_groups and encoding.fits_kernels(scales.shape[1])


def _dense(input: Tensor) -> Tensor:
    # torch multiplies a non-contiguous input as a batch of matrices, with a copy of the weight for each matrix.
    return input if input.is_contiguous() else input.contiguous()


def _multiply(linear: nn.Module, input: Tensor) -> Tensor:
    outputs, inputs = shape_of(linear)
    out = input.new_empty((*input.shape[:-1], outputs))
    _decode.linear(
        input.data_ptr(), *matrix_arguments(linear), out.data_ptr(), input.numel() // inputs, inputs, outputs,
        KINDS[input.dtype],
    )  # fmt: skip
    return out


def matrix_arguments(linear: nn.Module) -> tuple[int, int, int, int, int]:
    """Return a linear layer's fields of the C struct `Matrix` (`_matrix.h`).

    The first three are the addresses of weight, scales and bias (0 if the layer has none). The others are the distance
    between rows of the weight, in elements, and the group size of an int4 weight (0 for other weights).
    """
    weight, group = matrix_of(linear), 0
    if isinstance(linear, QuantizedLinear) and linear.encodings["weight"][0].per_byte > 1:
        group = linear.encodings["weight"][0].block
    tensors = (linear._parameters.get(name) for name in ("weight" + SCALE, "bias"))
    scales, bias = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    return weight.data_ptr(), scales, bias, weight.stride(0), group


def matrix_of(linear: nn.Module) -> Tensor:
    """Return a layer's weight as it is stored, which may be quantized."""
    weight = linear._parameters["weight"]
    assert weight is not None
    return weight


def shape_of(linear: nn.Module) -> tuple[int, ...]:
    """Return the shape `[out, in]` that a layer's weight has after dequantization."""
    shape = tuple(matrix_of(linear).shape)
    return linear.encodings["weight"][0].shape(shape) if isinstance(linear, QuantizedLinear) else shape


def data_type_of(linear: nn.Module) -> torch.dtype:
    return linear.encodings["weight"][1] if isinstance(linear, QuantizedLinear) else matrix_of(linear).dtype


class FusedRMSNorm(nn.Module):
    """A root-mean-square norm in C; mixed into the class of Llama's norm or of one of its many copies.

    The norm is x / √(mean(x²) + ε) ⊙ w over the last dimension of x (https://arxiv.org/abs/1910.07467).
    """

    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        if (
            weight is None
            or not _fits(hidden_states, weight)
            or not hidden_states.is_contiguous()
            or hidden_states.shape[-1:] != weight.shape
            or not weight.is_contiguous()
        ):
            return super().forward(hidden_states)
        out, width = torch.empty_like(hidden_states), weight.shape[0]
        _decode.rms_norm(
            hidden_states.data_ptr(), weight.data_ptr(), out.data_ptr(),
            hidden_states.numel() // width, width, KINDS[hidden_states.dtype], self.variance_epsilon,
        )  # fmt: skip
        return out


def serve_stock_code(is_stock: bool) -> None:
    """Tell the kernels of this process whether the model runs only code of torch and transformers. If not, the modules'
    own code always runs."""
    global _code_is_stock
    _code_is_stock = is_stock


def may_serve(device: str = "cpu") -> bool:
    """Return whether kernels may compute instead of modules: in inference mode, without autocast and `torch.compile`,
    and only for stock code of torch and transformers."""
    return (
        _code_is_stock
        and not torch.compiler.is_compiling()
        and torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled(device)
    )


def _fits(input: Tensor, weight: Tensor) -> bool:
    return may_serve() and input.dtype in KINDS and weight.dtype is input.dtype and input.is_cpu and weight.is_cpu


def is_usual() -> bool:
    """Return whether transformers' "sdpa" attention is still the function of transformers, or this package's wrapper of
    that function."""
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return getattr(attention, "__wrapped__", attention) is sdpa_attention_forward


def fits_mask(mask: Tensor, dtype: torch.dtype, batch: int, heads: int, tokens: int) -> bool:
    """Return whether the C attention can read a mask, `[batch or 1, heads or 1, 1, tokens]`: a bool mask, or numbers of
    the queries' data type that are added to the scores."""
    return (
        mask.shape[2:] == (1, tokens)
        and mask.dtype in (torch.bool, dtype)
        and mask.shape[0] in (1, batch)
        and mask.shape[1] in (1, heads)
        and mask.stride(3) == 1
    )


def spans_of(mask: Tensor | None, sequences: int, queries: int) -> Tensor | None:
    """Convert a causal mask, with or without left padding, to spans: one range of visible tokens for each sequence.

    Args:
        mask: bool mask of new tokens, `[sequences or 1, 1, queries, tokens]`; None if the sequences have no other
            tokens, and each new token sees all earlier ones.

    Returns:
        int64 `[sequences, 5]`, each row a C struct `Span` of `_queries.h`; None for a mask that is not of this form.
    """
    if mask is None:
        return torch.tensor([(b, 0, queries, b * queries, queries) for b in range(sequences)])
    if mask.dtype is not torch.bool or mask.shape[1:-1] != (1, queries) or mask.shape[0] not in (1, sequences):
        return None
    tokens, seen = mask.shape[3], mask[:, 0]
    place, ends = torch.arange(tokens), torch.arange(tokens - queries, tokens)[:, None]
    first = seen[:, -1].byte().argmax(-1)  # if the last query sees no token, `torch.equal` is False below
    if queries > tokens or not torch.equal(seen, (place >= first[:, None, None]) & (place <= ends)):
        return None
    number, first = torch.arange(sequences), first.expand(sequences)
    count = (tokens - first).clamp(max=queries)
    return torch.stack((number, first, torch.full_like(first, tokens), (number + 1) * queries - count, count), dim=1)


def mask_arguments(mask: Tensor | None) -> tuple[int, int, int, int]:
    """Return a mask's fields of the C struct `Mask` (`_queries.h`)."""
    if mask is None:
        return 0, 0, 0, _NO_MASK
    batch, head = (0 if mask.shape[dim] == 1 else mask.stride(dim) * mask.itemsize for dim in (0, 1))
    return mask.data_ptr(), batch, head, _BOOL_MASK if mask.dtype is torch.bool else _ADDED_MASK


class Guard:
    """Detects changes of modules that a kernel computes: a replaced or moved parameter, a replaced child or attribute,
    or a hook.

    Every decode step checks hundreds of modules, so the guard keeps flat lists.

    Args:
        places: pairs of a module's dictionary (`_parameters`, `_modules` or `vars(module)`) and a key. The value of the
            key must stay the same object, or stay missing.
        modules: modules that must not get hooks.

    Attributes:
        patched: modules whose `forward` is set on the instance. A kernel must not replace these modules.
    """

    def __init__(self, places: Iterable[tuple[dict[str, Any], str]], modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self.patched = [module for module in modules if "forward" in vars(module)]
        self._dictionaries, self._names, self._values = list[dict[str, Any]](), list[str](), list[Any]()
        self.watch(places)
        # One address is enough to notice `Module.to`, which moves all parameters of a model.
        self._first = [value for value in self._values if isinstance(value, Tensor)][:1]
        self._addresses = [tensor.data_ptr() for tensor in self._first]
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]

    def watch(self, places: Iterable[tuple[dict[str, Any], str]]) -> None:
        for dictionary, name in places:
            self._dictionaries.append(dictionary)
            self._names.append(name)
            self._values.append(dictionary.get(name))

    @classmethod
    def together(cls, parts: Sequence[Guard]) -> Guard:
        whole = cls((), ())
        for name, values in vars(whole).items():
            values.extend(chain.from_iterable(vars(part)[name] for part in parts))
        return whole

    def holds(self) -> bool:
        # The address is compared, too, because `Module.to` may keep a parameter object and move its memory.
        same = _still_contain(self._dictionaries, self._names, self._values)
        return same and [tensor.data_ptr() for tensor in self._first] == self._addresses

    def has_hooks(self) -> bool:
        """Return whether a module has a hook. After a request for hidden states or attentions, transformers leaves its
        hooks in the modules; such hooks count only during another such request."""
        if not any(self._hooks):
            return False
        sources = {getattr(hook, "__module__", "") for hooks in self._hooks for hook in hooks.values()}
        return sources != {output_capturing.__name__} or bool(output_capturing._active_collector.get())
