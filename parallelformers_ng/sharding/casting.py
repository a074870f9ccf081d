"""The data types of a model after `dtype=`: those that `from_pretrained(dtype=…)` would have given it.

`from_pretrained` does not cast every tensor. It builds the class with another default type: tensors whose type the
modelling code names (rotary frequencies, a router's bias) keep theirs, and all others change, including buffers outside
checkpoints. A copy of the class, built likewise on `meta`, tells them apart.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.sharding.tensors import all_tensors

log = logging.getLogger("parallelformers_ng")

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def target_dtype(fp16: bool, dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the data type asked for by `fp16` and `dtype` of `parallelize`, or None.

    Raises:
        ParallelError: they contradict each other, or name none.
    """
    if dtype == "auto":
        dtype = None
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        if name not in _DTYPES:
            raise ParallelError(f"dtype is {dtype!r}; it takes one of {', '.join(_DTYPES)}")
        dtype = _DTYPES[name]
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise ParallelError(f"dtype is {dtype!r}; it takes a floating-point torch.dtype")
    if fp16 and dtype not in (None, torch.float16):
        raise ParallelError(f"fp16=True and dtype={dtype} contradict each other; give one of them")
    return torch.float16 if fp16 else dtype


class CastRule:
    """The data types of a model after a cast to `dtype`; None leaves all as they are.

    Tensors that the class does not make itself (of a module that the user put in, or of no transformers model) are cast
    if a checkpoint holds them.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._model = model
        self._made = None if dtype is None else _made_in(model, dtype)
        built = {} if self._made is None else all_tensors(self._made)
        self._types = {name: tensor.dtype for name, tensor in built.items()}
        planned = self._made._get_dtype_plan(dtype) if self._made is not None and dtype is not None else {}
        # As transformers reads them: anywhere in a name, the first that matches counts.
        self._patterns = {re.compile(pattern.replace("*", ".*")): kind for pattern, kind in planned.items()}

    def dtype_of(self, name: str, tensor: torch.Tensor, persistent: bool = True) -> torch.dtype:
        """Return the data type of a parameter or buffer after the cast.

        Args:
            persistent: whether checkpoints hold it.
        """
        if self.dtype is None:
            return tensor.dtype
        if persistent:
            for pattern, kind in self._patterns.items():
                if pattern.search(name):
                    return kind
        cast = tensor.is_floating_point() and (persistent or name in self._types)
        return self._types.get(name, self.dtype) if cast else tensor.dtype

    def settings(self) -> dict[str, Any]:
        """Attributes that hold a data type, by dotted name, and the one they have after the cast: those of modules, and
        of the configuration and its parts."""
        if self._made is None:
            return {}
        named, built = dict(_data_types(self._model)), dict(_data_types(self._made))
        return {name: built[name] for name, kind in named.items() if built.get(name, kind) != kind}


def holds_plain_weights(model: PreTrainedModel) -> bool:
    """Return whether the weights of a model are plain numbers, of the names and shapes that its class has
    unquantized: transformers marks a model of a GGUF file as quantized also where it unpacked the file."""
    tensors = all_tensors(model)
    if any(type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in tensors.values()):
        return False
    built = _made_in(model, model.dtype)
    plain = {} if built is None else all_tensors(built)
    wanted = {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in plain.items()}
    shapes = {
        name: (tensor.shape, tensor.is_floating_point() and tensor.itemsize > 1) for name, tensor in tensors.items()
    }
    return shapes == wanted


def _made_in(model: nn.Module, dtype: torch.dtype) -> PreTrainedModel | None:
    """Return the same class as `from_pretrained(dtype=dtype)` builds it, on `meta`; None if that cannot be told."""
    if not isinstance(model, PreTrainedModel):
        return None
    try:
        with torch.device("meta"):
            return type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    except Exception as error:  # the modelling code decides what it can be built from
        log.warning(
            "%s cannot be built from its configuration alone (%s), so its buffers that no checkpoint holds keep their"
            " data type. from_pretrained(dtype=%s) casts them where its code says so",
            type(model).__name__,
            f"{type(error).__name__}: {error}".partition("\n")[0],
            dtype,
        )
        return None


def _data_types(model: Any) -> Iterator[tuple[str, torch.dtype | None]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.dtype):
                yield f"{path}.{name}".removeprefix("."), value
    yield "config.dtype", model.config.dtype
    for part in model.config.sub_configs:
        if getattr(model.config, part, None) is not None:
            yield f"config.{part}.dtype", getattr(model.config, part).dtype
