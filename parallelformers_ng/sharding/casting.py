"""Computes the data type of each tensor after `parallelize(dtype=…)`, equal to that of `from_pretrained(dtype=…)`.

`from_pretrained` does not cast every tensor. It builds the class with another default data type. A tensor keeps its
data type if the modelling code names that type (rotary frequencies, a router's bias). `dtype=` casts all other tensors,
including buffers that are not saved in checkpoints. A copy of the class, built the same way on `meta`, shows each
tensor's type.
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
from parallelformers_ng.options import DTYPES
from parallelformers_ng.sharding.attributes import parts_of
from parallelformers_ng.sharding.tensors import all_tensors
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

log = logging.getLogger("parallelformers_ng")


def target_dtype(fp16: bool, dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the data type that the arguments `fp16` and `dtype` of `parallelize` select; None casts nothing."""
    if dtype == "auto":
        dtype = None
    if isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPES:
        dtype = getattr(torch, dtype.removeprefix("torch."))
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise ParallelError(f"dtype is {dtype!r}; it takes a floating-point torch.dtype, or one of {', '.join(DTYPES)}")
    if fp16 and dtype not in (None, torch.float16):
        raise ParallelError(f"fp16=True and dtype={dtype} contradict each other; give one of them")
    return torch.float16 if fp16 else dtype


class CastRule:
    """Decides the data type of each tensor after a cast to `dtype`; with None every tensor keeps its data type.

    The constructor builds the model's class on `meta` to see the data types that the class gives its tensors. It logs
    a warning if that fails. Tensors that the class does not create, such as those of a module that the user added, are
    cast if checkpoints hold them.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._model = model
        self._copy = None if dtype is None else _copy_in(model, dtype)
        built = {} if self._copy is None else all_tensors(self._copy)
        self._types = {name: tensor.dtype for name, tensor in built.items()}
        planned = self._copy._get_dtype_plan(dtype) if self._copy is not None and dtype is not None else {}
        # As in transformers, a pattern may match anywhere in a tensor's name, and the first matching pattern decides.
        self._patterns = {re.compile(pattern.replace("*", ".*")): kind for pattern, kind in planned.items()}

    def dtype_of(self, name: str, tensor: torch.Tensor, persistent: bool = True) -> torch.dtype:
        if self.dtype is None:
            return tensor.dtype
        if persistent:
            for pattern, kind in self._patterns.items():
                if pattern.search(name):
                    return kind
        cast = tensor.is_floating_point() and (persistent or name in self._types)
        return self._types.get(name, self.dtype) if cast else tensor.dtype

    def settings(self) -> dict[str, Any]:
        """Return the attributes of modules and configurations that name a data type which the cast changes.

        The result maps their dotted names to the data type after the cast, for example "config.dtype".
        """
        if self._copy is None:
            return {}
        named, built = dict(_data_types(self._model)), dict(_data_types(self._copy))
        return {name: built[name] for name, kind in named.items() if built.get(name, kind) != kind}


def holds_plain_weights(model: PreTrainedModel) -> bool:
    """Return whether a model that transformers marks as quantized has ordinary weights after all.

    transformers also marks models from GGUF files whose weights it dequantized. Ordinary weights are plain tensors with
    the names and shapes that the model's class builds.
    """
    tensors = all_tensors(model)
    if any(type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in tensors.values()):
        return False
    built = _copy_in(model, model.dtype)
    plain = {} if built is None else all_tensors(built)
    wanted = {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in plain.items()}
    shapes = {
        name: (tensor.shape, tensor.is_floating_point() and tensor.itemsize > 1) for name, tensor in tensors.items()
    }
    return shapes == wanted


def _copy_in(model: nn.Module, dtype: torch.dtype) -> PreTrainedModel | None:
    """Build an empty model of the same class on `meta`, as `from_pretrained(dtype=dtype)` does; None if that fails."""
    if not isinstance(model, PreTrainedModel):
        return None
    try:
        with torch.device("meta"):
            return type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    except Exception as error:  # modelling code may raise anything
        raise_if_of_handler(error)
        log.warning(
            "%s cannot be built from its configuration alone (%s), so its buffers outside checkpoints keep their data"
            " type; load the model with from_pretrained(dtype=%s) to cast these buffers as well",
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
    yield from ((f"{prefix}dtype", config.dtype) for prefix, config in parts_of(model.config, "config."))
