"""Replaces CUDA graphs on the CPU: the operators of a step are recorded, and run again on the same memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelformers_ng.collectives import communicator
from parallelformers_ng.sharding import heads, vocabulary

_aten = torch.ops.aten
_FORBIDDEN = {_aten._local_scalar_dense, _aten.nonzero, _aten.lift_fresh}


class _Thread(threading.local):
    records = False


_thread = _Thread()


def _is_compiling() -> bool:
    return torch.compiler.is_compiling() or _thread.records


for _module in (communicator, heads, vocabulary):
    _module.is_compiling = _is_compiling  # type: ignore[attr-defined]


@contextlib.contextmanager
def operators_alone() -> Iterator[None]:
    """Make the recording of this thread within the block contain only its operators, as for the compiler.

    A CUDA graph records NCCL's queued work itself, and does not need this function.
    """
    before, _thread.records = _thread.records, True
    try:
        yield
    finally:
        _thread.records = before


class OperatorRecorder:
    """A recorder with the rules of CUDA graphs: recording computes nothing, and addresses and control flow are frozen.

    A step that needs a number on the host fails. A replay runs no Python of the model.

    Attributes:
        recordings: number of recordings so far.
        replays: number of replays so far.
        fails: whether recordings fail.
        may_replay: whether a replay is allowed now.
    """

    fails = False

    def __init__(self) -> None:
        self.recordings = 0
        self.replays = 0
        self.may_replay = True

    def warm_up(self, step: Callable[[], Any]) -> Any:
        with operators_alone():
            return step()

    def record(self, step: Callable[[], Any]) -> tuple[Any, Recorded]:
        tape = Tape()
        try:
            with operators_alone(), tape:
                output = step()
            if self.fails:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for it")
        finally:
            tape.undo()
        self.recordings += 1

        return output, Recorded(self, tape)

    def destroy(self, recorded: Recorded) -> None:
        assert recorded.tape is not None, "a recording was destroyed twice"
        recorded.tape = None


class Recorded:
    """A recorded step that can be replayed."""

    def __init__(self, recorder: OperatorRecorder, tape: Tape) -> None:
        self._recorder = recorder
        self.tape: Tape | None = tape

    def replay(self) -> None:
        assert self._recorder.may_replay, "a recording runs although its connections may end"
        assert self.tape is not None, "a destroyed recording runs"
        self._recorder.replays += 1
        self.tape.run()


class Tape(TorchDispatchMode):
    """A list of the operators that run within the block; `undo` restores the memory that these operators wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Sequence[Any], Mapping[str, Any], list[Tensor | None]]] = []
        self._own: set[int] = set()  # storages of the step's own intermediate results
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # other written storages, and their old contents

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _FORBIDDEN:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        with self:
            output = func.decompose(*args, **kwargs)
        if output is not NotImplemented:
            return output
        argument_storages = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        writes = False
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes = True
                self._remember(args[place] if place < len(args) else kwargs[argument.name])
        output = func(*args, **kwargs)
        leaves = [leaf if isinstance(leaf, Tensor) else None for leaf in tree_leaves(output)]
        fresh = [None if leaf is None or _storage(leaf) in argument_storages else leaf for leaf in leaves]
        self._own.update(_storage(leaf) for leaf in fresh if leaf is not None)
        if writes or not leaves or any(leaf is not None for leaf in fresh):  # a view needs no entry
            self._calls.append((func, args, kwargs, fresh))
        return output

    @property
    def last(self) -> Tensor:
        """Return the tensor that the last operator made."""
        return next(tensor for *_, fresh in reversed(self._calls) for tensor in fresh if tensor is not None)

    def run(self) -> None:
        for func, args, kwargs, fresh in self._calls:
            for old, new in zip(fresh, tree_leaves(func(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)

    def undo(self) -> None:
        for memory, contents in self._before.values():
            memory.copy_(contents)

    def _remember(self, written: Tensor) -> None:
        number = _storage(written)
        if number not in self._own and number not in self._before:
            memory = torch.empty(0, dtype=torch.uint8).set_(_memory(written).untyped_storage())
            self._before[number] = (memory, memory.clone())


def _storage(tensor: Tensor) -> int:
    return _memory(tensor).untyped_storage()._cdata


def _memory(tensor: Tensor) -> Tensor:
    """Return the host tensor with the same memory; the memory of a pretended device is host memory, too."""
    return getattr(tensor, "host", tensor)
