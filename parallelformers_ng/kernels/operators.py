"""Operators that run in `_decode.c`: they read weights, keys and values once, at the full speed of the memory, and spend
one call where torch spends several.

All of them leave the work to torch wherever it must do it: gradients, autocast, `torch.compile`, other data types.
Sums run in another order than torch's, so results may differ in the last bits.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Iterable, Sequence
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
except ImportError as error:  # installed without a compiler, or a clone that hides what is installed
    _decode = None  # type: ignore[assignment]
    logging.getLogger("parallelformers_ng").debug("decode steps are computed in torch: %s", error)

KINDS = {torch.float32: 0, torch.bfloat16: 1}
_HAS_TILES, _HAS_PAIRS = (getattr(_decode, name, False) for name in ("HAS_TILES", "HAS_PAIRS"))
# If the processor multiplies bfloat16 and the kernel was built without that, torch is twice as fast: the kernel widens it.
_ONE_BY_ONE = torch.cpu._is_avx512_bf16_supported() and not (_HAS_TILES or _HAS_PAIRS)
MOST_ROWS = {
    torch.float32: 16,
    torch.bfloat16: 4 if _ONE_BY_ONE else 2048 if _HAS_PAIRS and not _HAS_TILES else 32,
}
"""With more rows torch's matrix product is as fast or faster. In pairs of bfloat16 the kernel keeps up with torch, and the
limit is one of memory."""
MOST_ROWS_OF_INTEGERS = {torch.float32: 16, torch.bfloat16: 32}
"""With more, the weight is put together once for all of them."""
_code_is_stock = True
_NO_MASK, _BOOL_MASK, _ADDED_MASK = range(3)


class StreamingLinear(nn.Linear):
    """`nn.Linear` for one row or a few. The rows of the weight may lie apart."""

    def forward(self, input: Tensor) -> Tensor:
        # Called for every matrix and token: the dictionary is read directly, past nn.Module.__getattr__.
        weight = self._parameters["weight"]
        if (
            weight is None
            or not _fits(input, weight)
            or not 0 < input.numel() <= MOST_ROWS[input.dtype] * weight.shape[1]
            or input.shape[-1] != weight.shape[1]
            or weight.stride(1) != 1
        ):
            return super().forward(input)
        return _multiply(self, input)


class StreamingQuantizedLinear(QuantizedLinear):
    """The same for integers and scales, which are read as they are."""

    def forward(self, input: Tensor) -> Tensor:
        _, inputs = shape_of(self)
        if (
            not self.is_read
            or data_type_of(self) is not input.dtype
            or not may_serve()
            or not 0 < input.numel() <= MOST_ROWS_OF_INTEGERS[input.dtype] * inputs
            or input.shape[-1] != inputs
            or not (input.is_cpu and input.is_contiguous())
        ):
            return super().forward(input)
        return _multiply(self, input)

    @property
    def is_read(self) -> bool:
        """Whether the kernel reads such integers and scales."""
        (encoding, dtype), scales = self.encodings["weight"], self._parameters["weight" + SCALE]
        assert scales is not None
        if dtype not in KINDS or not matrix_of(self).is_contiguous() or not scales.is_contiguous():
            return False
        whole_groups = encoding.kind == "int8" or shape_of(self)[1] == encoding.block * scales.shape[1]
        return whole_groups and encoding.fits_kernels(scales.shape[1])


def _multiply(linear: nn.Module, input: Tensor) -> Tensor:
    outputs, inputs = shape_of(linear)
    out = input.new_empty((*input.shape[:-1], outputs))
    _decode.linear(
        input.data_ptr(), *matrix_arguments(linear), out.data_ptr(), input.numel() // inputs, inputs, outputs,
        KINDS[input.dtype],
    )  # fmt: skip
    return out


def matrix_arguments(linear: nn.Module) -> tuple[int, int, int, int, int]:
    """`Matrix` of `_integers.h`: the addresses of a weight, its scales and a bias, the distance between rows, and how
    many inputs share a scale where it is of 4 bits."""
    weight, group = matrix_of(linear), 0
    if isinstance(linear, QuantizedLinear) and linear.encodings["weight"][0].per_byte > 1:
        group = linear.encodings["weight"][0].block
    others = (linear._parameters.get(name) for name in ("weight" + SCALE, "bias"))
    scales, bias = (0 if other is None else other.data_ptr() for other in others)
    return weight.data_ptr(), scales, bias, weight.stride(0), group


def matrix_of(linear: nn.Module) -> Tensor:
    """Return the numbers of a linear layer's weight, small ones if it is quantized."""
    weight = linear._parameters["weight"]
    assert weight is not None
    return weight


def shape_of(linear: nn.Module) -> tuple[int, ...]:
    """`[out, in]` of a linear layer's weight."""
    shape = tuple(matrix_of(linear).shape)
    return linear.encodings["weight"][0].shape(shape) if isinstance(linear, QuantizedLinear) else shape


def data_type_of(linear: nn.Module) -> torch.dtype:
    """Return the data type that a linear layer computes in."""
    return linear.encodings["weight"][1] if isinstance(linear, QuantizedLinear) else matrix_of(linear).dtype


class FusedRMSNorm(nn.Module):
    """Llama's root-mean-square norm and its many copies, mixed into their classes."""

    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        if (
            weight is None
            or not _fits(hidden_states, weight)
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
    """Say whether models run the libraries' own code. If not, the kernels compute nothing in the place of modules."""
    global _code_is_stock
    _code_is_stock = is_stock


def may_serve(device: str = "cpu") -> bool:
    """Return whether modules run stock code, and nothing is going on that only torch's own operators can do: gradients,
    autocast, a trace.

    Args:
        device: type of the device that computes.
    """
    return (
        _code_is_stock
        and not torch.compiler.is_compiling()
        and torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled(device)
    )


def _fits(input: Tensor, weight: Tensor) -> bool:
    return (
        may_serve()
        and input.dtype in KINDS
        and weight.dtype is input.dtype
        and input.is_cpu
        and weight.is_cpu
        and input.is_contiguous()
    )


def install_attention() -> None:
    """Give models of this process that ask transformers for "sdpa" the kernel for single queries, if it was built
    and torch has one thread. Idempotent."""
    if _decode is not None and torch.get_num_threads() == 1:
        usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
        if not hasattr(usual, "__wrapped__"):
            ALL_ATTENTION_FUNCTIONS.register("sdpa", with_kernel(usual))


def is_usual() -> bool:
    """Return whether "sdpa" is what transformers means by it, with the kernel or without, and not a function of the
    user's."""
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return getattr(attention, "__wrapped__", attention) is sdpa_attention_forward


def with_kernel(attention: Any) -> Any:
    """`attention`, a function of transformers' attention interface, with the kernel for what the kernel can do."""

    @functools.wraps(attention)
    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if (
            may_serve()
            and is_plain_attention(query, kwargs)
            and _fits_attention(module, query, key, value, attention_mask)
        ):
            return _attend(query, key, value, attention_mask, kwargs.get("scaling")), None
        return attention(module, query, key, value, attention_mask, **kwargs)

    return forward


def is_plain_attention(query: Tensor, kwargs: dict[str, Any]) -> bool:
    """Return whether one query, `[batch, heads, 1, width]`, is asked for, and nothing but what its mask and scaling
    say."""
    return (
        query.shape[2] == 1
        and not any(kwargs.get(name) for name in ("dropout", "softcap", "output_attentions"))
        and kwargs.get("position_bias") is None
        and kwargs.get("cache") is None
    )


def _fits_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    batch, heads, _, width = query.shape
    key_batch, kv_heads, tokens, key_width = key.shape
    dtype = query.dtype
    return (
        dtype in KINDS
        and key.dtype is dtype
        and value.dtype is dtype
        and key_batch == batch
        and key_width == width
        and value.shape[:3] == key.shape[:3]
        and tokens > 0
        and kv_heads > 0
        and heads == kv_heads * getattr(module, "num_key_value_groups", 1)
        and query.is_cpu
        and key.is_cpu
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and (mask is None or fits_mask(mask, dtype, batch, heads, tokens))
    )


def fits_mask(mask: Tensor, dtype: torch.dtype, batch: int, heads: int, tokens: int) -> bool:
    """Return whether the kernel reads such a mask: bool or added, `[batch or 1, heads or 1, 1, tokens]`."""
    return (
        mask.ndim == 4
        and (mask.dtype is torch.bool or mask.dtype is dtype)
        and mask.shape[0] in (1, batch)
        and mask.shape[1] in (1, heads)
        and mask.shape[2:] == (1, tokens)
        and mask.stride(3) == 1
    )


def spans_of(mask: Tensor, spans: Tensor) -> bool:
    """Return whether a mask lets each of some new tokens see the tokens up to itself, from a first one of its sequence on.

    Args:
        mask: bool `[sequences, 1, new tokens, tokens]`.
        spans: int64 `[sequences, 5]`; becomes `Span`s of `_queries.h`.
    """
    if mask.dtype is not torch.bool or mask.ndim != 4 or mask.shape[1] != 1 or mask.stride(3) != 1:
        return False
    sequences, _, queries, tokens = mask.shape
    if not 0 < queries <= tokens:
        return False
    arguments = mask.data_ptr(), mask.stride(0), mask.stride(2), sequences, queries, tokens, spans.data_ptr()
    return bool(_decode.spans(*arguments))


def mask_arguments(mask: Tensor | None) -> tuple[int, int, int, int]:
    """For the kernel: the address of a mask, its distances from one sequence and one head to the next, its kind."""
    if mask is None:
        return 0, 0, 0, _NO_MASK
    batch, head = (0 if mask.shape[dim] == 1 else mask.stride(dim) * mask.itemsize for dim in (0, 1))
    return mask.data_ptr(), batch, head, _BOOL_MASK if mask.dtype is torch.bool else _ADDED_MASK


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention of `[batch, heads, 1, width]` over `[batch, kv_heads, tokens, width]`.

    Returns:
        `[batch, 1, heads, value_width]`, contiguous.
    """
    batch, heads, _, width = query.shape
    _, kv_heads, tokens, value_width = value.shape
    out = query.new_empty((batch, 1, heads, value_width))
    _decode.attention(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), *key.stride()[:3], *value.stride()[:3],
        *mask_arguments(mask), out.data_ptr(), 0, batch, batch, heads, kv_heads, tokens, width, value_width,
        *query.stride()[:2], KINDS[query.dtype],
        width**-0.5 if scaling is None else scaling,
    )  # fmt: skip
    return out


class Guard:
    """The conditions under which a kernel may replace modules without calling them: their parameters are at the known
    addresses, and no module has a hook.

    It is asked at each step, of hundreds of modules, and answers with a few passes over flat lists.

    Args:
        places: modules and the names of their parameters, which may be None.
        modules: all that are not called. A hook on any is a reason to call them.

    Attributes:
        patched: modules that had a forward of their own, not of their class. They must be called.
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str]], modules: Iterable[nn.Module]) -> None:
        places, modules = list(places), list(modules)
        self.patched = [module for module in modules if "forward" in vars(module)]
        self._parameters = [module._parameters for module, _ in places]
        self._names = [name for _, name in places]
        self._tensors = list(map(dict.get, self._parameters, self._names))
        present = [tensor for tensor in self._tensors if tensor is not None]
        self._first = present[:1]  # `to` moves all parameters of a module, and usually of all modules
        self._addresses = [tensor.data_ptr() for tensor in self._first]
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]

    @classmethod
    def together(cls, parts: Sequence[Guard]) -> Guard:
        """Return the guard of all that the parts guard."""
        whole = cls((), ())
        for name, values in vars(whole).items():
            values.extend(chain.from_iterable(vars(part)[name] for part in parts))
        return whole

    def holds(self) -> bool:
        """Return whether the modules have the tensors that were looked at, and in the same memory, which `to`
        changes."""
        same = all(map(operator.is_, map(dict.get, self._parameters, self._names), self._tensors))
        return same and [tensor.data_ptr() for tensor in self._first] == self._addresses

    def has_hooks(self) -> bool:
        """Return whether a hook on the modules has something to do. Those that transformers has once put there,
        because hidden states or attentions were asked for, stay, and do nothing unless they are asked for again."""
        if not any(self._hooks):
            return False
        places = {getattr(hook, "__module__", "") for hooks in self._hooks for hook in hooks.values()}
        return places != {output_capturing.__name__} or bool(output_capturing._active_collector.get())
