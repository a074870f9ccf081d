"""Runs one rank's share of a model on `meta`, where nothing is computed, and notes what it would do: the bytes that
operators move, the exchanges with other ranks, the caches, the memory in between."""

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

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.sharding import look_ups
from parallelformers_ng.sharding.cache_names import CACHES
from parallelformers_ng.sharding.experts import has_experts_interface
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.stages import units

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention
_LOOK_UPS = (_aten.embedding, _aten.index_select, _aten.gather, _aten.index)
"""Operators that read of their first input no more than they give."""


@dataclass(frozen=True)
class Work:
    """One operator, or one exchange between ranks.

    Attributes:
        moved: bytes read from memory and written to it, or of the tensor that ranks sum or gather.
        fuses: a compiler makes one kernel of it and its neighbours: it is no product, no attention and no look-up.
        exchanges: it is a sum or a gather.
        gathers: it is a gather.
    """

    moved: float
    fuses: bool = False
    exchanges: bool = False
    gathers: bool = False


@dataclass(frozen=True)
class Observation:
    """The work of a rank for sequences of some length.

    Attributes:
        peak: bytes of what is neither weights nor caches, at most, while all tokens but the last are read at once.
        step: work for the last token, with the others in the caches, in order.
        caches: unit → bytes of its caches at the end.
    """

    peak: int
    step: list[Work]
    caches: dict[str, int]


def observe(model: PreTrainedModel, plan: ShardPlan, rank: int, batch: int, length: int) -> Observation:
    """Run a rank's share of a model.

    Args:
        model: on any device; it stays as it is.
        plan: in which every rank holds a part of every layer.
        batch: sequences.
        length: tokens of each, at least 2.

    Raises:
        UnsupportedModelError: it does not generate, keeps no caches, or asks on its way for numbers.
    """
    if not model.can_generate():
        raise UnsupportedModelError(f"{type(model).__name__} does not generate: there is no token to time")
    recorder = _Recorder()
    counted = _on_meta(model)
    _count_experts(counted, recorder)
    share = cut(counted, plan, rank, _Peers(rank, plan.world_size, recorder))
    known = dict(share.named_modules())
    for path in units(model):
        if path in known:  # else it is a bare parameter
            recorder.watch(path, known[path])
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    prompt: dict[str, Any] = {"input_ids": ids[:, 1:]}
    token: dict[str, Any] = {"input_ids": ids[:, :1]}
    if model.config.is_encoder_decoder:
        prompt, token = prompt | {"decoder_input_ids": ids[:, 1:]}, {"decoder_input_ids": ids[:, :1]}
    if "logits_to_keep" in inspect.signature(share.forward).parameters:  # as `generate` calls it
        prompt["logits_to_keep"] = 1
    try:
        with torch.inference_mode():
            _, peak, output = recorder.record(lambda: share(**prompt, use_cache=True))
            if model.config.is_encoder_decoder:
                token["encoder_outputs"] = (output.encoder_last_hidden_state,)
            name = next((each for each in CACHES if output.get(each) is not None), "")
            if not name:
                raise UnsupportedModelError(
                    f"{type(model).__name__} keeps nothing from token to token; it cannot be planned"
                )
            caches = output[name]
            step, _, output = recorder.record(lambda: share(**token, use_cache=True, **{name: caches}))
            cache_bytes = recorder.caches(output.get(name, caches))
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever modelling code raises if a number is missing
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be run without its numbers, and nothing else can be planned by: {reason}"
        ) from error
    finally:
        look_ups.forget()
    return Observation(peak, step, cache_bytes)


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model without its weights."""
    empty: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = torch.empty_like(tensor, device="meta")
        empty[id(tensor)] = nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(model, empty)


class _Recorder(TorchDispatchMode):
    """Notes operators. Each storage that one makes has a number, by which its life and its unit are known."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Work] = []
        self._units = [""]
        self._numbers = WeakIdKeyDictionary()
        self._made_in: dict[int, str] = {}
        self._lives: list[tuple[int, int]] = []
        self._held: set[int] = set()

    def watch(self, path: str, unit: nn.Module) -> None:
        """Have the work of a unit be known by its path."""
        unit.register_forward_pre_hook(lambda *_: self._units.append(path), prepend=True)
        unit.register_forward_hook(lambda *_: self._units.pop() and None, always_call=True)

    def record(self, forward: Callable[[], Any]) -> tuple[list[Work], int, Any]:
        """Run a forward; return its work, the peak of its temporary bytes, and its output."""
        self.work, self._lives = [], []
        with self:
            output = forward()
        caches = _caches_of(output)
        self._held = {self._number(tensor) for tensor in caches}
        level = peak = 0
        for number, size in self._lives:
            level += 0 if number in self._held else size
            peak = max(peak, level)
        return self.work, peak, output

    def caches(self, cache: Any) -> dict[str, int]:
        """Unit → bytes that it made of what caches hold."""
        cache_bytes: dict[str, int] = {}
        for tensor in tensors_in(cache):
            unit = self._made_in.get(self._number(tensor), "")
            cache_bytes[unit] = cache_bytes.get(unit, 0) + tensor.nbytes
        return cache_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, func._overloadpacket
        if kind is _aten._local_scalar_dense and args[0].dtype is torch.bool:
            return True  # what modelling code asks so: whether all tokens are there, none of them padding
        if kind is not _ATTENTION and kind not in flop_registry:
            with self:
                parts = func.decompose(*args, **kwargs)  # what it is made of is noted instead
            if parts is not NotImplemented:
                return parts
        before = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        known = {self._number(tensor) for tensor in before}
        output = func(*args, **kwargs)
        after = [tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor)]
        fresh = {self._number(tensor, is_new=True) for tensor in after} - known
        if fresh or func._schema.is_mutable:  # else it is a view
            fuses = kind is not _ATTENTION and kind not in flop_registry and kind not in _LOOK_UPS
            self.work.append(Work(self._moved(kind, before, after), fuses))
        return output

    def _moved(self, kind: Any, before: list[Tensor], after: list[Tensor]) -> float:
        written = sum(_bytes(tensor) for tensor in after)
        if kind in _LOOK_UPS:
            return 2 * written
        if kind is _aten.cat:  # what caches hold stays where it is, as ranks append to it in place
            return 2 * sum(_bytes(tensor) for tensor in before if self._number(tensor) not in self._held)
        return written + sum(_bytes(tensor) for tensor in before)

    def _number(self, tensor: Tensor, is_new: bool = False) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = len(self._made_in)
            self._made_in[number] = self._units[-1]
            if is_new:
                size, lives = storage.nbytes(), self._lives
                lives.append((number, size))
                weakref.finalize(storage, lives.append, (number, -size))
        return number


class _Peers(Communicator):
    """A rank's end of a group that is not there."""

    def __init__(self, rank: int, world_size: int, recorder: _Recorder) -> None:
        super().__init__(rank, world_size)
        self._recorder = recorder

    def _part(self, width: int) -> Communicator:
        return _Peers(self.rank % width, width, self._recorder)

    def sum(self, tensor: Tensor) -> Tensor:
        self._recorder.work.append(Work(tensor.nbytes, exchanges=True))
        return tensor

    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        whole = tensor.new_empty((*tensor.shape[:dim], sum(sizes), *tensor.shape[dim + 1 :]))
        self._recorder.work.append(Work(whole.nbytes, exchanges=True, gathers=True))
        return whole

    def abort(self, reason: str) -> None:
        raise AssertionError("a group that is not there has nothing to abort")


def _count_experts(model: nn.Module, recorder: _Recorder) -> None:
    """Have stacked experts note their reads instead of computing: the router's numbers, absent here,
    would choose the experts.

    Of `E` experts, `n` tokens that choose `k` each, all as likely, meet E (1 - (1 - k / E) ** n) different ones.
    """

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any) -> Tensor:
        stacked = [each for each in self._parameters.values() if each is not None and each.ndim == 3]
        count, chosen, each = stacked[0].shape[0], top_k_index.numel(), top_k_index.shape[-1]
        met = count * (1 - (1 - each / count) ** (chosen // each))
        numbers = sum(stack.numel() for stack in stacked) / count
        states = 2 * _bytes(hidden_states) * each
        recorder.work.append(Work(met * numbers * stacked[0].itemsize + states))
        return torch.empty_like(hidden_states)

    for module in model.modules():
        if has_experts_interface(module):
            cls: type = type(module)
            module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory; a repeated number counts once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield every tensor that an object holds, at whatever depth, once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part, seen)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), seen)


def _caches_of(output: Any) -> Iterator[Tensor]:
    for name in CACHES:
        yield from tensors_in(output.get(name))
