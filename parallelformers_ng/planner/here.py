"""This machine's CPU ranks as a device, measured in seconds: reading, arithmetic, exchanges, and the rest of a step."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from parallelformers_ng.api import parallelize, plan, start_group
from parallelformers_ng.collectives.arena import available_memory
from parallelformers_ng.planner.devices import Cluster, Device, Link
from parallelformers_ng.planner.observation import observe
from parallelformers_ng.runtime.group import WorkerGroup

_SLIM = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
_WIDTH = 1024
_WIDE = {"hidden_size": _WIDTH, "intermediate_size": 4 * _WIDTH, "num_attention_heads": 16, "num_key_value_heads": 16}
_WIDE_BYTES = 400e6
"""More than caches hold."""
_LAYERS, _TOKENS, _PROMPT, _ROUNDS = 17, 16, 128, 5


@dataclass(frozen=True)
class Probe:
    """Measurements of a number of ranks, in seconds, bytes and operations a second of one rank.

    Attributes:
        step: seconds of a decode step without a layer.
        layer: seconds of a decoder layer in one call, its sums included, with hardly any bytes.
        operator: seconds of an operator of another layer.
        layer_bandwidth: bytes that such decoder layers read.
        bandwidth: bytes that other operators read.
        flops: operations.
    """

    step: float
    layer: float
    operator: float
    layer_bandwidth: float
    bandwidth: float
    flops: float


def probe_here(ranks: int, dtype: torch.dtype) -> Probe:
    """Start so many ranks and measure them."""
    with start_group(ranks, device="cpu") as group:
        return probe(group, dtype)


def as_cluster(measured: Probe, alone: Probe, devices: int, dtype: torch.dtype) -> Cluster:
    """Return one host, with the figures of ranks that work at a time. A layer has two sums; what it takes longer than
    on one rank alone is theirs.

    Args:
        measured: measurements of the ranks.
        alone: measurements of one rank.
        devices: ranks that there may be, between which the memory is shared out.
        dtype: data type of the computation.
    """
    device = Device(
        available_memory() / devices,
        measured.bandwidth,
        {dtype: measured.flops},
        "",
        "measured",
        operator_seconds=measured.operator,
        host_seconds=0.0,
        read_share=1.0,
        flops_share=1.0,
        step_seconds=measured.step,
        layer_seconds=alone.layer,
        layer_bandwidth=measured.layer_bandwidth,
    )
    # Ranks copy what they sum: each reads what the others wrote.
    link = Link(measured.bandwidth, 0.0, max(0.0, measured.layer - alone.layer) / 2, "measured")
    return Cluster(device, 1, devices, link, link)


def probe(group: WorkerGroup, dtype: torch.dtype) -> Probe:
    """Decode small models of random shape on a group that is there, and a wide one."""
    slim = [LlamaConfig(**_SLIM, num_hidden_layers=count, vocab_size=128) for count in (1, _LAYERS)]
    plain = [_plain(64, 4, count) for count in (1, 5)]
    count = round(_WIDE_BYTES / dtype.itemsize / (16 * _WIDTH**2))
    wide = LlamaConfig(**_WIDE, num_hidden_layers=count, vocab_size=128)
    one, many = (_step_of(group, config, dtype) for config in slim)
    layer = _more(many, one) / (_LAYERS - 1)
    operators = (_operators(plain[1], group.world_size, dtype) - _operators(plain[0], group.world_size, dtype)) / 4
    few, more = (_step_of(group, config, dtype) for config in plain)
    operator = _more(more, few) / 4 / operators
    with running(group, wide, dtype) as model:
        size = max(model.shard_plan.bytes_per_rank)
        step = step_seconds(model, 8, _TOKENS)
        prompt = statistics.median(_seconds(model, _PROMPT, 1) for _ in range(_ROUNDS))
    reading = _more(step, one + (count - 1) * layer)
    operations = 2 * size / dtype.itemsize * _PROMPT
    count = round(_WIDE_BYTES / dtype.itemsize / (12 * _WIDTH**2))
    with running(group, _plain(_WIDTH, 16, count), dtype) as model:
        plain_size = max(model.shard_plan.bytes_per_rank)
        plain_reading = _more(step_seconds(model, 8, _TOKENS), few + (count - 1) * operators * operator)
    return Probe(
        _more(one, layer),
        layer,
        operator,
        size / reading,
        plain_size / plain_reading,
        operations / _more(prompt, step),
    )


def _plain(width: int, heads: int, layers: int) -> PreTrainedConfig:
    """Return a model whose layers no single call computes."""
    ends = {"bos_token_id": None, "eos_token_id": None}
    return GPT2Config(n_embd=width, n_head=heads, n_layer=layers, vocab_size=128, **ends)


def _more(long: float, short: float) -> float:
    """Return the extra seconds of a whole over its part; at least 0, as other programs disturb the measurements."""
    return max(long - short, 1e-9)


def _step_of(group: WorkerGroup, config: PreTrainedConfig, dtype: torch.dtype) -> float:
    with running(group, config, dtype) as model:
        return step_seconds(model, 8, 2 * _TOKENS)


def step_seconds(model: Any, prompt: int, tokens: int) -> float:
    """Return seconds of a decode step: a call with many tokens, less one with one."""
    _seconds(model, prompt, 2)
    rounds = [_seconds(model, prompt, tokens + 1) - _seconds(model, prompt, 1) for _ in range(_ROUNDS)]
    return statistics.median(rounds) / tokens


def _seconds(model: Any, prompt: int, tokens: int) -> float:
    ids = torch.ones(1, prompt, dtype=torch.long)
    limits = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), **limits)
    return time.perf_counter() - start


@contextlib.contextmanager
def running(group: WorkerGroup, config: PreTrainedConfig, dtype: torch.dtype) -> Iterator[Any]:
    model = _made(config, dtype).to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().zero_()
    model.tie_weights()
    with parallelize(model, workers=group, progress=False, batching=False) as running:
        yield running


def _operators(config: PreTrainedConfig, ranks: int, dtype: torch.dtype) -> int:
    model = _made(config, dtype)
    seen = observe(model, plan(model, ranks), 0, 1, 8)
    return sum(not work.exchanged for work in seen.step.work)


def _made(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
