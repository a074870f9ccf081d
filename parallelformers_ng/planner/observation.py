"""Runs one rank's shard of a model on `meta`, and records the bytes that operators move, exchanges, caches and memory.

Tensors on `meta` have shapes but no numbers, so nothing is computed.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.twin import failure_of
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.sharding import look_ups
from parallelformers_ng.sharding.cache_names import CACHES
from parallelformers_ng.sharding.experts import has_experts_interface
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.quantized import QuantizedLinear
from parallelformers_ng.sharding.stages import units

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention
# Operators that read only as many bytes of their first input as they return.
_LOOK_UPS = (_aten.embedding, _aten.index_select, _aten.gather, _aten.index)


@dataclass(frozen=True)
class Work:
    """One operator of a forward pass, or one exchange between ranks."""

    moved: float  # bytes that an operator reads and writes, or bytes of the tensor that ranks sum or gather
    # Whether torch.compile can fuse the operator with its neighbours: all except matrix products, attention, look-ups.
    fuses: bool = False
    exchanges: bool = False  # whether the work is a sum or a gather between ranks
    gathers: bool = False  # whether the work is a gather between ranks


@dataclass(frozen=True)
class Observation:
    """The operators that one rank runs in a decode step, and the memory that it needs."""

    peak: int  # peak of temporary memory during the prefill, in bytes, without weights and caches
    step: list[Work]  # work of the last decode step, in order
    caches: dict[str, int]  # path of a unit of the model → bytes of its caches after the last decode step


def observe(model: PreTrainedModel, plan: ShardPlan, rank: int, batch: int, length: int) -> Observation:
    """Run one rank's shard of a model on `meta`: the prefill, then one decode step."""
    if not model.can_generate():
        raise UnsupportedModelError(
            f"{type(model).__name__} does not generate; a forecast needs a model with generate()"
        )
    recorder = _Recorder()
    counted = _on_meta(model)
    _count_experts(counted, recorder)
    shard = cut(counted, plan, rank, _Peers(rank, plan.world_size, recorder))
    _count_quantized(shard, recorder)
    known = dict(shard.named_modules())
    for path in units(model):
        if path in known:  # `units` also returns paths of single parameters, which cannot have hooks
            recorder.watch(path, known[path])
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    prompt: dict[str, Any] = {"input_ids": ids[:, 1:]}
    token: dict[str, Any] = {"input_ids": ids[:, :1]}
    if model.config.is_encoder_decoder:
        prompt, token = prompt | {"decoder_input_ids": ids[:, 1:]}, {"decoder_input_ids": ids[:, :1]}
    if "logits_to_keep" in inspect.signature(shard.forward).parameters:  # `generate` computes only the last logits
        prompt["logits_to_keep"] = 1
    try:
        with torch.inference_mode():
            _, peak, output = recorder.record(lambda: shard(**prompt, use_cache=True))
            if model.config.is_encoder_decoder:
                token["encoder_outputs"] = (output.encoder_last_hidden_state,)
            name = next((each for each in CACHES if output.get(each) is not None), "")
            if not name:
                raise UnsupportedModelError(
                    f"{type(model).__name__} returns no cache; a forecast needs a model that caches its tokens"
                )
            caches = output[name]
            step, _, output = recorder.record(lambda: shard(**token, use_cache=True, **{name: caches}))
            cache_bytes = recorder.caches(output.get(name, caches))
    except UnsupportedModelError:
        raise
    except Exception as error:  # modelling code may raise any error if it needs numbers
        raise UnsupportedModelError(
            f"{type(model).__name__} fails on the meta device, and a forecast runs the model there: {failure_of(error)}"
        ) from error
    finally:
        look_ups.forget()
    return Observation(peak, step, cache_bytes)


def _on_meta(model: nn.Module) -> nn.Module:
    empty: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = torch.empty_like(tensor, device="meta")
        empty[id(tensor)] = nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(model, empty)


class _Recorder(TorchDispatchMode):
    """Mode that records the bytes that operators move, and which unit of the model allocated which memory."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Work] = []
        self._units = [""]
        self._numbers = WeakIdKeyDictionary()
        self._creators: dict[int, str] = {}
        self._size_changes: list[tuple[int, int]] = []
        self._cache_numbers: set[int] = set()

    def watch(self, path: str, unit: nn.Module) -> None:
        """Add hooks to a unit, so that memory allocated in its forward is recorded under its path."""
        unit.register_forward_pre_hook(lambda *_: self._units.append(path), prepend=True)
        unit.register_forward_hook(lambda *_: self._units.pop() and None, always_call=True)

    def record(self, forward: Callable[[], Any]) -> tuple[list[Work], int, Any]:
        """Run a forward; return its work, the peak of its temporary memory in bytes, and its output."""
        self.work, self._size_changes = [], []
        with self:
            output = forward()
        caches = [output.get(name) for name in CACHES]
        self._cache_numbers = {self._number(tensor) for tensor in tensors_in(caches)}
        level = peak = 0
        for number, size in self._size_changes:
            level += 0 if number in self._cache_numbers else size
            peak = max(peak, level)
        return self.work, peak, output

    def caches(self, cache: Any) -> dict[str, int]:
        """Return, for each unit, the bytes of cache tensors that the unit created."""
        cache_bytes: dict[str, int] = {}
        for tensor in tensors_in(cache):
            unit = self._creators.get(self._number(tensor), "")
            cache_bytes[unit] = cache_bytes.get(unit, 0) + tensor.nbytes
        return cache_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, func._overloadpacket
        if kind is _aten._local_scalar_dense and args[0].dtype is torch.bool:
            return True  # on `meta` there is no value; modelling code asks whether the attention mask has no padding
        if kind is not _ATTENTION and kind not in flop_registry:
            with self:
                parts = func.decompose(*args, **kwargs)  # runs simpler operators, which this mode records instead
            if parts is not NotImplemented:
                return parts
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        input_numbers = {self._number(tensor) for tensor in inputs}
        output = func(*args, **kwargs)
        outputs = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
        new_numbers = {self._number(tensor, is_new=True) for tensor in outputs} - input_numbers
        if new_numbers or func._schema.is_mutable:  # otherwise the operator is a view, which moves no bytes
            fuses = kind is not _ATTENTION and kind not in flop_registry and kind not in _LOOK_UPS
            self.work.append(Work(self._moved(kind, inputs, outputs), fuses))
        return output

    def _moved(self, kind: Any, inputs: list[Tensor], outputs: list[Tensor]) -> float:
        written = sum(_bytes(tensor) for tensor in outputs)
        if kind in _LOOK_UPS:
            return 2 * written
        if kind is _aten.cat:  # ranks write new tokens into a static KV cache, so old tokens are not copied
            return 2 * sum(_bytes(tensor) for tensor in inputs if self._number(tensor) not in self._cache_numbers)
        return written + sum(_bytes(tensor) for tensor in inputs)

    def _number(self, tensor: Tensor, is_new: bool = False) -> int:
        """Return the number of a tensor's storage; `is_new` records the size of a storage without a number."""
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = len(self._creators)
            self._creators[number] = self._units[-1]
            if is_new:
                size, changes = storage.nbytes(), self._size_changes
                changes.append((number, size))
                weakref.finalize(storage, changes.append, (number, -size))
        return number


class _Peers(Communicator):
    """Communicator of a rank without other ranks: records exchanges, and sends nothing."""

    def __init__(self, rank: int, world_size: int, recorder: _Recorder) -> None:
        super().__init__(rank, world_size)
        self._recorder = recorder

    def sum(self, tensor: Tensor) -> Tensor:
        self._recorder.work.append(Work(tensor.nbytes, exchanges=True))
        return tensor

    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        whole = tensor.new_empty((*tensor.shape[:dim], sum(sizes), *tensor.shape[dim + 1 :]))
        self._recorder.work.append(Work(whole.nbytes, exchanges=True, gathers=True))
        return whole

    def abort(self, reason: str) -> None:
        raise AssertionError("an observed rank has no group to abort")


def _count_experts(model: nn.Module, recorder: _Recorder) -> None:
    """Replace the forwards of stacked experts by recorders of their reads, because the router has no numbers on `meta`.

    If each of n tokens chooses k of E experts, and all experts are equally likely, E (1 - (1 - k / E) ** n) different
    experts are used on average.
    """

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any) -> Tensor:
        stacked = [each for each in self._parameters.values() if each is not None and each.ndim == 3]
        count, choices, per_token = stacked[0].shape[0], top_k_index.numel(), top_k_index.shape[-1]
        used_experts = count * (1 - (1 - per_token / count) ** (choices // per_token))
        numbers = sum(stack.numel() for stack in stacked) / count
        states = 2 * _bytes(hidden_states) * per_token
        recorder.work.append(Work(used_experts * numbers * stacked[0].itemsize + states))
        return torch.empty_like(hidden_states)

    for module in model.modules():
        if has_experts_interface(module):
            cls: type = type(module)
            module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _count_quantized(shard: nn.Module, recorder: _Recorder) -> None:
    """Replace products with quantized weights by recorders of one read of the stored numbers, because the Triton
    kernels read them once."""

    class Counted(QuantizedLinear):
        def forward(self, input: Tensor) -> Tensor:
            parts = [part for part in self._parameters.values() if part is not None]
            output = input.new_empty((*input.shape[:-1], len(parts[0])))
            recorder.work.append(Work(sum(map(_bytes, (*parts, input, output)))))
            return output

    for module in shard.modules():
        if isinstance(module, QuantizedLinear):
            bases = [Counted if base is QuantizedLinear else base for base in type(module).__bases__]
            module.__class__ = Counted if type(module) is QuantizedLinear else type("Counted", (*bases,), {})


def _bytes(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    seen = set() if seen is None else seen
    for leaf in tree_leaves(value):
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from tensors_in(vars(leaf), seen)
