"""Tests that removed hooks have no effect, and that hooks of a failed call have the notes of the rank that raised."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError, WorkerError
from parallelformers_ng.model.dispatcher import may_be_hooked
from parallelformers_ng.model.remote_module import remote_of
from parallelformers_ng.worker.call import Call
from tests.strangers.agreement import NEW_TOKENS, assert_agree, prompt
from tests.zoo.decoders import decoder


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("before", [False, True], ids=["registered later", "there at first"])
def test_calls_share_a_batch_again_after_a_hook(groups, kind: str, before: bool) -> None:
    whole, cut = decoder("Llama"), decoder("Llama")
    notes: list[int] = []

    def note(*_: Any) -> None:
        notes.append(1)

    handles = [getattr(cut.model.norm, kind)(note)] if before else []
    parallelize(cut, workers=groups(2), batching=True)
    calls = remote_of(cut).calls
    assert may_be_hooked(calls.hooks) is before
    for _ in range(2):
        handles += [] if handles else [getattr(cut.model.norm, kind)(note)]
        count = len(notes)
        assert_agree(cut, whole, prompt())
        assert len(notes) > count
        handles.pop().remove()
        assert not may_be_hooked(calls.hooks)
        count = len(notes)
        assert_agree(cut, whole, prompt())
        assert len(notes) == count
    cut.deparallelize()


def test_hooks_may_change_while_other_threads_call(groups) -> None:
    whole, cut = decoder("Llama", layers=4), parallelize(decoder("Llama", layers=4), workers=groups(2), batching=True)
    want = whole.generate(prompt(6), **NEW_TOKENS).tolist()
    places = [cut.model, cut.model.norm, cut.lm_head, *cut.model.layers]
    end, errors = time.monotonic() + 3, list[BaseException]()

    def register() -> None:
        try:
            while time.monotonic() < end:
                for handle in [place.register_forward_hook(lambda *_: None) for place in places]:
                    handle.remove()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=register) for _ in range(3)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        assert cut.generate(prompt(6), **NEW_TOKENS).tolist() == want
    for thread in threads:
        thread.join()
    assert not errors
    assert not may_be_hooked(remote_of(cut).calls.hooks)
    cut.deparallelize()


class Notes:
    """Two hooks of one module that note their calls; the first raises on one rank at its second call."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, list[str]()

    def first(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls.append("first")
        rank = next(layer.communicator.rank for layer in module.modules() if hasattr(layer, "communicator"))
        if rank == self.rank and self.calls.count("first") == 2:
            raise ZeroDivisionError("a hook gave out")

    def second(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls.append("second")


def hooked(rank: int) -> tuple[Any, Notes]:
    model, notes = decoder("Llama"), Notes(rank)
    for hook in (notes.first, notes.second):
        model.model.layers[0].register_forward_hook(hook)
    return model, notes


@pytest.mark.parametrize("rank", [0, 1])
def test_notes_come_from_the_rank_that_raised(groups, rank: int) -> None:
    """The reference is one process, in which the second hook is not called after the first hook has raised."""
    whole, (cut, notes) = decoder("Llama"), hooked(rank)
    parallelize(cut, workers=groups(2), batching=False)
    with torch.no_grad():
        assert torch.allclose(cut(prompt()).logits, whole(prompt()).logits, atol=1e-4)
    with pytest.raises(ZeroDivisionError) as caught:
        cut(prompt())
    assert isinstance(caught.value, WorkerError)
    assert caught.value.rank == rank
    assert notes.calls == ["first", "second", "first"]
    assert_agree(cut, whole, prompt())
    assert notes.calls == ["first", "second", "first"] + ["first", "second"] * (1 + NEW_TOKENS["max_new_tokens"])
    cut.deparallelize()


def test_notes_of_a_failed_call_outlive_other_requests(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another call, without hooks, runs before the notes are fetched."""
    cut, notes = hooked(1)
    notes.calls = ["first"]
    group = groups(2)
    parallelize(cut, workers=group, batching=False)
    ask = {name: getattr(group, name) for name in ("call", "call_each")}

    def late(name: str) -> Any:
        def called(method: str, *args: Any, **kwargs: Any) -> Any:
            if method == "hooks.changes":
                rng = torch.get_rng_state().numpy().tobytes()
                ask["call"]("run", Call("", "num_parameters", (), {}, rng=rng, cache_block=1 << 40))
            return ask[name](method, *args, **kwargs)

        return called

    for name in ask:
        monkeypatch.setattr(group, name, late(name))
    with pytest.raises(ZeroDivisionError):
        cut(prompt())
    monkeypatch.undo()
    assert notes.calls == ["first", "first"]
    cut.deparallelize()


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_beside_those_of_transformers_run(groups, kind: str) -> None:
    """transformers itself hooks modules to collect attention weights; such a module keeps its table of hooks."""
    cut = decoder("Llama", attention="eager")
    with torch.no_grad():
        cut(prompt(), output_attentions=True)
    inner = next(module for path, module in cut.named_modules() if path.count(".") > 2 and module._forward_hooks)
    parallelize(cut, workers=groups(2))
    assert not may_be_hooked(remote_of(cut).calls.hooks)
    with pytest.raises(ParallelError, match=r"is inside model\.layers"):
        _call_with(cut, getattr(inner, kind))
    assert not may_be_hooked(remote_of(cut).calls.hooks)
    cut.deparallelize()


def _call_with(model: Any, register: Any) -> None:
    handle = register(lambda *_: None)
    try:
        model(prompt())
    finally:
        handle.remove()


class RunsOnce:
    """A hook that removes itself through its own list of handles."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.runs = 0

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.handles[0].remove()
        return output * 0.5


def tokens_with_own_removals(model: Any) -> list[list[int]]:
    """Return the tokens of a call in which an object and a function are hooks that remove themselves."""
    runs = list[int]()

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        runs.append(len(runs))
        handle.remove()

    hook = RunsOnce()
    hook.handles.append(model.model.norm.register_forward_hook(hook))
    handle = model.model.norm.register_forward_hook(note)
    tokens: list[list[int]] = model.generate(prompt(), **NEW_TOKENS).tolist()
    assert (hook.runs, runs) == (1, [0])
    assert not model.model.norm._forward_hooks
    return tokens


def test_hooks_remove_themselves_during_a_call(groups) -> None:
    whole, cut = decoder("Llama"), decoder("Llama")
    with parallelize(cut, workers=groups(2)):
        assert tokens_with_own_removals(cut) == tokens_with_own_removals(whole)
        assert_agree(cut, whole, prompt())
