"""Twins of the Triton kernels: the same functions in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from parallelformers_ng.kernels.triton.nibble_product import GROUP


def sum_twin(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the result of `summed`, computed by plain torch.

    Args:
        p: partial results, `[splits, rows, outputs]`.
        dtype: data type of the sum.
    """
    return p.sum(0).to(dtype)


def norm_twin(x: Tensor, d: Tensor | None, w: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return s = x + d and the norm of s, computed by plain torch. If d is None, s is x.

    Args:
        x: `[…, columns]`.
        d: partial results, `[splits, rows, columns]`, or None.
        w: weight of the norm, `[columns]`.
        epsilon: ε of the norm.
    """
    s = x if d is None else x + sum_twin(d, x.dtype).view_as(x)
    wide = s if s.dtype is torch.float64 else s.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * w
    return s, normed.to(x.dtype)


def rotary_twin(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    epsilon: float, keys: Tensor, values: Tensor, positions: Tensor,
) -> Tensor:  # fmt: skip
    """Return the result of `rotate_and_write`, and change keys and values like it, by plain torch.

    Args:
        q, k, v, cos, sin, q_norm, k_norm, epsilon, keys, values, positions: the arguments of `rotary_launches`.
    """
    rows, kv_heads, room, width = keys.shape
    q, k, v = (sum_twin(each, keys.dtype) for each in (q, k, v))

    def turned(states: Tensor, w: Tensor | None) -> Tensor:
        heads = states.reshape(rows, -1, width)
        if w is not None:
            heads = (heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + epsilon) * w).to(states.dtype)
        first, second = heads.chunk(2, -1)
        return heads * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

    new = turned(k, k_norm), v.reshape(rows, kv_heads, width)
    for row, position in enumerate(positions.expand(rows).tolist()):
        if 0 <= position < room:
            for cache, states in zip((keys, values), new, strict=True):
                cache[row, :, position] = states[row]
    return turned(q, q_norm).flatten(1)


def attention_twin(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scale: float,
    mask: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Return the result of `attend`, computed by plain torch, row by row, on the CPU.

    Args:
        q, keys, values, lengths, scale, mask, window: the arguments of `attention_launches`.
    """
    rows, kv_heads, room, width = keys.shape
    y = torch.zeros_like(q)
    for row, length in enumerate(lengths.expand(rows).tolist()):
        end = min(length + 1, room)
        position = torch.arange(max(0, end - window) if window else 0, end)
        if mask is not None:
            position = position[mask.expand(rows, -1)[row, position] != 0]
        if len(position):
            queries = q[row].view(kv_heads, -1, width)
            scores = queries @ keys[row][:, position].transpose(1, 2) * scale
            wide = scores if scores.dtype is torch.float64 else scores.float()
            y[row] = (wide.softmax(-1).to(q.dtype) @ values[row][:, position]).flatten()
    return y


def gate_twin(g: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the result of `gated`, computed by plain torch.

    Args:
        g, u, dtype: the arguments of `gated`.
    """
    g, u = (sum_twin(each, dtype) for each in (g, u))
    return functional.silu(g) * u


def byte_product_twin(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """Return the sum of the result of `byte_product`, `[rows, sum of the outputs]`, computed by plain torch.

    Each weight is widened in memory.

    Args:
        x: `[rows, inputs]`, with any number of rows.
        weights, scales, biases: the arguments of `byte_product`, for any number of weights.
    """
    outputs = [
        functional.linear(x, weight.to(x.dtype)) * scale.flatten()
        for weight, scale in zip(weights, scales, strict=True)
    ]
    if biases:
        outputs = [output + bias for output, bias in zip(outputs, biases, strict=True)]
    return torch.cat(outputs, -1).to(x.dtype)


def nibble_product_twin(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """Return the sum of the result of `nibble_product`, `[rows, sum of the outputs]`, computed by plain torch.

    Each weight is dequantized in memory.

    Args:
        x: `[rows, inputs]`, with any number of rows.
        weights, scales, biases: the arguments of `nibble_product`, for any number of weights.
    """
    outputs = []
    for weight, scale in zip(weights, scales, strict=True):
        signed = weight.view(torch.int8)
        numbers = torch.stack((signed << 4 >> 4, signed >> 4), -1).flatten(1)
        whole = (numbers.unflatten(1, (-1, GROUP)) * scale.unsqueeze(-1)).flatten(1).to(x.dtype)
        outputs.append(functional.linear(x, whole))
    if biases:
        outputs = [output + bias for output, bias in zip(outputs, biases, strict=True)]
    return torch.cat(outputs, -1)
