"""Computes a `device_map` for `from_pretrained` that divides a model over devices, evenly or by a ratio."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import StaticCache

from parallelformers_ng.checkpoint.model_class import class_of, on_meta
from parallelformers_ng.errors import ParallelError, PlacementError
from parallelformers_ng.options import FitOptions
from parallelformers_ng.runtime.placement import check_count
from parallelformers_ng.sharding.stages import Sizes, find_stages, tensors_of, units
from parallelformers_ng.sharding.tensors import is_within


def balanced_device_map(
    model_or_config: PreTrainedModel | PreTrainedConfig,
    num_devices: int,
    ratio: Sequence[float] | None = None,
    device_ids: Sequence[int | str] | None = None,
    *,
    batch: int = 1,
    length: int = 0,
) -> dict[str, int | str]:
    """Return a `device_map` for `from_pretrained` that keeps the load of the fullest device as small as possible.

    Each device gets consecutive modules. The load of a device is the bytes of its weights and key/value cache, divided
    by its share. Modules of the classes in `_no_split_modules`, and tied weights, stay on one device.

    Args:
        model_or_config: a model on any device (also `meta`), or a configuration.
        num_devices: number of devices.
        ratio: relative share of each device, one number per device; None for equal shares.
        device_ids: numbers or names of the devices; by default 0, 1, 2, ….
        batch: number of sequences in the key/value cache.
        length: tokens of each sequence in the key/value cache; 0 counts no key/value cache.

    Returns:
        Path of a module, or of a parameter outside of the listed modules → device.

    Raises:
        PlacementError: `num_devices` is not a positive integer, the model has too few modules for the devices, or
            the length of `device_ids` is not `num_devices`.
        ParallelError: `ratio`, `batch` or `length` is invalid.
        UnsupportedModelError: transformers has no class for the configuration.
    """
    check_count(num_devices, "num_devices")
    parts = FitOptions(ratio=None if ratio is None else tuple(ratio)).parts(num_devices)
    shares = parts or [1 / num_devices] * num_devices
    devices = list(range(num_devices) if device_ids is None else device_ids)
    if len(devices) != num_devices:
        raise PlacementError(f"num_devices is {num_devices}, but device_ids has {len(devices)} devices: {devices}")
    if batch < 1 or length < 0:
        raise ParallelError(f"batch is {batch} and length is {length}; batch must be at least 1, length at least 0")
    model = model_or_config
    if isinstance(model, PreTrainedConfig):
        model = on_meta(class_of(model), model)
    unit_tensors: dict[str, Sizes] = {
        unit: {id(t): t.nbytes for t in tensors_of(model, unit).values()} for unit in units(model)
    }
    cached = _cache_bytes(model, batch, length)
    sizes: dict[str, dict[Hashable, float]] = {}
    homes = _tied_homes(unit_tensors)
    for unit, home in homes.items():
        size = sizes.setdefault(home, {})
        size.update(unit_tensors[unit])
        size[unit] = sum(each for path, each in cached.items() if is_within(path, unit))
    firsts = list(sizes)
    stages = zip(find_stages(list(sizes.values()), shares), devices, strict=True)
    where = {home: device for (start, stop), device in stages for home in firsts[start:stop]}
    return {unit: where[home] for unit, home in homes.items()}


def _tied_homes(unit_tensors: dict[str, Sizes]) -> dict[str, str]:
    """Map each module to the first module with which it shares a tensor, directly or through others; else to itself."""
    homes: dict[str, str] = {}
    owners: dict[Hashable, str] = {}
    for unit, tensors in unit_tensors.items():
        tied = {homes[owners[key]] for key in tensors if key in owners}
        first = next((home for home in homes.values() if home in tied), unit)
        homes = {each: first if home in tied else home for each, home in homes.items()} | {unit: first}
        owners = dict.fromkeys(tensors, unit) | owners
    return homes


def _cache_bytes(model: PreTrainedModel, batch: int, length: int) -> dict[str, int]:
    """Map the path of each attention module of the decoder to the bytes of its key/value cache."""
    config = model.config.get_text_config(decoder=True)
    queries = getattr(config, "num_attention_heads", None)
    if not length or not model.can_generate() or not queries:
        return {}
    heads = getattr(config, "num_key_value_heads", None) or queries
    width = getattr(config, "head_dim", None) or config.hidden_size // queries
    layers = StaticCache(config, max_cache_len=length).layers
    decoder: Any = model.get_decoder()
    start = next(path for path, module in model.named_modules() if module is decoder)
    cache_bytes = {}
    for path, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        if is_within(path, start) and isinstance(index, int) and index < len(layers) and _is_attention(module):
            tokens = getattr(layers[index], "max_cache_len", 0)  # a layer without KV cache has no length
            cache_bytes[path] = 2 * batch * tokens * heads * width * model.dtype.itemsize
    return cache_bytes


def _is_attention(module: torch.nn.Module) -> bool:
    """Whether a module with a `layer_idx` is an attention, not a decoder layer: no submodule has a `layer_idx`."""
    return not any(isinstance(getattr(part, "layer_idx", None), int) for part in module.modules() if part is not module)
