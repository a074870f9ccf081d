"""Tests that objects given to a call behave as in one process: what the call changes comes home, and what other threads
change reaches the ranks. The oracle is the plain model."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import io
import itertools
import logging
import os
import random
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor, StoppingCriteria

from parallelformers_ng import NotPortableError, ParallelError, parallelize
from tests.generation import settings_of_arguments as settings
from tests.strangers.agreement import prompt
from tests.zoo.decoders import decoder

pytestmark = pytest.mark.promise("arguments")
OPTIONS = {"max_new_tokens": 3, "do_sample": False}
LONG = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": None}


class Slots:
    __slots__ = ("n", "other")

    def __init__(self) -> None:
        self.n = 0


@dataclasses.dataclass(slots=True)
class SlotData:
    n: int = 0
    seen: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    seen: dict[str, int]


class Dict(dict):
    pass


class List(list):
    pass


class Pickled:
    def __init__(self) -> None:
        self._n = 0

    def __getstate__(self) -> dict[str, int]:
        return {"n": self._n}

    def __setstate__(self, state: dict[str, int]) -> None:
        self._n = state["n"]


class Stepping(LogitsProcessor):
    """Runs a function on its attribute `x` at every token."""

    total = 0

    def __init__(self, x: Any, step: Callable[[Any], Any]) -> None:
        self.x, self.step, self.new = x, step, None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.step(self)
        return scores


def add_attribute(processor: Any) -> None:
    processor.x["k"] = processor.x.extra = processor.x.get("k", 0) + 1


def move_first_to_end(processor: Any) -> None:
    processor.x.move_to_end(next(iter(processor.x)))


def count_in_class(processor: Any) -> None:
    type(processor).total += 1


def note_new(processor: Any) -> None:
    processor.new = processor.new or []
    processor.new.append(len(processor.new))


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda: 0, lambda p: setattr(p, "x", p.x + 1), lambda p: p.x),
    "removed attribute": (lambda: 0, lambda p: vars(p).pop("new", None), lambda p: hasattr(p, "new")),
    "new list": (lambda: 0, note_new, lambda p: p.new),
    "Random": (lambda: random.Random(1), lambda p: p.x.random(), lambda p: p.x.getstate()),
    "numpy Generator": (
        lambda: np.random.default_rng(1),
        lambda p: p.x.random(),
        lambda p: p.x.bit_generator.state,
    ),
    "RandomState": (lambda: np.random.RandomState(1), lambda p: p.x.rand(), lambda p: p.x.get_state()[1].tolist()),
    "torch Generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda p: torch.rand((), generator=p.x),
        lambda p: p.x.get_state().tolist(),
    ),
    "slots": (Slots, lambda p: setattr(p.x, "n", p.x.n + 1), lambda p: p.x.n),
    "dataclass with slots": (
        SlotData,
        lambda p: (setattr(p.x, "n", p.x.n + 1), p.x.seen.append(p.x.n)),
        lambda p: (p.x.n, p.x.seen),
    ),
    "frozen dataclass": (lambda: Frozen({}), lambda p: p.x.seen.update(n=len(p.x.seen)), lambda p: p.x.seen),
    "array": (lambda: array.array("i", [0]), lambda p: p.x.append(1), lambda p: p.x.tolist()),
    "bytearray": (bytearray, lambda p: p.x.append(1), lambda p: bytes(p.x)),
    "Counter": (collections.Counter, lambda p: p.x.update("a"), lambda p: dict(p.x)),
    "deque": (lambda: collections.deque(maxlen=2), lambda p: p.x.append(1), lambda p: (len(p.x), p.x.maxlen)),
    "defaultdict": (lambda: collections.defaultdict(list), lambda p: p.x["k"].append(1), lambda p: p.x["k"]),
    "OrderedDict": (
        lambda: collections.OrderedDict(a=1, b=2, c=3, d=4),
        move_first_to_end,
        lambda p: [*p.x.items()],
    ),
    "removed key": (lambda: dict.fromkeys(range(9)), lambda p: p.x.popitem(), lambda p: [*p.x]),
    "UserDict": (collections.UserDict, lambda p: p.x.update(n=1), lambda p: dict(p.x)),
    "SimpleNamespace": (
        lambda: types.SimpleNamespace(n=0),
        lambda p: setattr(p.x, "n", p.x.n + 1),
        lambda p: p.x.n,
    ),
    "ChainMap": (
        lambda: collections.ChainMap({"n": 0}, {"m": 1}),
        lambda p: p.x.update(n=p.x["n"] + p.x["m"]),
        lambda p: dict(p.x),
    ),
    "keywords of a partial function": (
        lambda: functools.partial(print, end=""),
        lambda p: p.x.keywords.update(end=p.x.keywords["end"] + "a"),
        lambda p: p.x.keywords,
    ),
    "method of a list": (lambda: [0].append, lambda p: p.x(len(p.x.__self__)), lambda p: p.x.__self__),
    "method of a dictionary": (lambda: {0: 0}.__setitem__, lambda p: p.x(1, 2), lambda p: p.x.__self__),
    "exception": (
        lambda: ValueError("x"),
        lambda p: setattr(p.x, "n", getattr(p.x, "n", 0) + 1),
        lambda p: (p.x.n, p.x.args),
    ),
    "sparse tensor": (lambda: torch.eye(2).to_sparse(), lambda p: p.x.mul_(2), lambda p: p.x.to_dense().tolist()),
    "sparse tensor with other indices": (
        lambda: torch.eye(2).to_sparse(),
        lambda p: p.x.add_(torch.ones(2, 2).to_sparse()),
        lambda p: p.x.to_dense().tolist(),
    ),
    "sparse rows": (lambda: torch.eye(2).to_sparse_csr(), lambda p: p.x.mul_(2), lambda p: p.x.to_dense().tolist()),
    "resized tensor": (lambda: torch.zeros(2), lambda p: p.x.resize_(3).fill_(1), lambda p: p.x.tolist()),
    "iterator": (lambda: iter([1, 2, 3, 4, 5]), lambda p: next(p.x), lambda p: next(p.x)),
    "map": (lambda: map(abs, [1, 2, 3, 4, 5]), lambda p: next(p.x), lambda p: next(p.x)),
    "memoryview": (
        lambda: memoryview(bytearray(1)),
        lambda p: p.x.__setitem__(0, p.x[0] + 1),
        lambda p: bytes(p.x),
    ),
    "count": (itertools.count, lambda p: next(p.x), lambda p: repr(p.x)),
    "StringIO": (io.StringIO, lambda p: p.x.write("a"), lambda p: p.x.getvalue()),
    "BytesIO": (io.BytesIO, lambda p: p.x.write(b"a"), lambda p: p.x.getvalue()),
    "subclass of dict": (Dict, add_attribute, lambda p: (dict(p.x), p.x.extra)),
    "subclass of list": (
        List,
        lambda p: (p.x.append(1), setattr(p.x, "extra", len(p.x))),
        lambda p: ([*p.x], p.x.extra),
    ),
    "own pickling": (Pickled, lambda p: setattr(p.x, "_n", p.x._n + 1), lambda p: p.x._n),
    "class attribute": (lambda: 0, count_in_class, lambda p: type(p).total),
    "numpy array": (lambda: np.zeros(2), lambda p: p.x.__iadd__(1), lambda p: p.x.tolist()),
    "tensor": (lambda: torch.zeros(2), lambda p: p.x.add_(1), lambda p: p.x.tolist()),
    "large tensor": (lambda: torch.zeros(1 << 16), lambda p: p.x[5:].add_(1), lambda p: float(p.x.sum())),
    "dictionary in a tuple": (lambda: ({"n": 0},), lambda p: p.x[0].update(n=p.x[0]["n"] + 1), lambda p: p.x[0]["n"]),
    "set": (set, lambda p: p.x.add(len(p.x)), lambda p: sorted(p.x)),
    "module of torch": (
        lambda: torch.nn.BatchNorm1d(2),
        lambda p: p.x.running_mean.add_(1),
        lambda p: p.x.running_mean.tolist(),
    ),
}


@pytest.fixture(scope="module")
def cut(groups):
    with parallelize(decoder("Llama"), workers=groups(2), batching=False) as model:
        yield model


@pytest.fixture(scope="module")
def whole():
    return decoder("Llama")


@pytest.mark.parametrize("batching", [False, True])
def test_what_a_processor_changes_comes_home_in_place(groups, whole, batching: bool) -> None:
    with parallelize(decoder("Llama"), workers=groups(2), batching=batching) as model:
        for kind, (make, step, read) in KINDS.items():
            results = []
            for each in (whole, model):
                Stepping.total = 0
                processor, x = Stepping(make(), step), None
                x = processor.x
                each.generate(prompt(5), logits_processor=[processor], **OPTIONS)
                results.append(read(processor))
                in_place = kind in ("attribute", "count") or processor.x is x
                assert in_place, kind
            assert results[0] == results[1], kind


def test_globals_defaults_and_function_attributes_come_home(whole, cut) -> None:
    expected = None
    for model in (whole, cut, cut):
        settings.reset()
        model.generate(prompt(5), prefix_allowed_tokens_fn=settings.noting, **OPTIONS)
        model.generate(prompt(5), logits_processor=[settings.Noting()], **OPTIONS)
        model.generate(prompt(5), prefix_allowed_tokens_fn=by_module, **OPTIONS)
        expected = expected or settings.state()
        assert settings.state() == expected
    settings.ALLOWED[:] = [7]  # values that were changed since the ranks imported the module
    assert cut.generate(prompt(5), prefix_allowed_tokens_fn=settings.noting, **OPTIONS)[0, -3:].tolist() == [7, 7, 7]
    settings.ALLOWED[:] = range(5, 60)


def by_module(batch: int, ids: torch.Tensor) -> list[int]:
    settings.count += 10
    return settings.ALLOWED


def test_changes_before_an_exception_come_home(whole, cut) -> None:
    def fail_at_third(processor: Any) -> None:
        processor.x.append(len(processor.x))
        if len(processor.x) == 3:
            raise KeyError("third")

    for model in (whole, cut):
        processor = Stepping([], fail_at_third)
        with pytest.raises(KeyError):
            model.generate(prompt(5), logits_processor=[processor], **LONG)
        assert processor.x == [0, 1, 2]


class Reporting(LlamaForCausalLM):
    """Writes to the objects given to its forward."""

    def forward(self, input_ids=None, report=None, table=None, scratch=None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **kwargs)
        if report is not None:
            report.append(input_ids.shape[1])
            table["mean"], table["report"] = round(float(output.logits.mean()), 4), report
            scratch.add_(1)
        return output

    def fill(self, pair: Any) -> int:
        pair.seen.append(pair.n)
        pair.n += 1
        return pair.n


def test_objects_given_to_forward_and_to_own_methods(groups) -> None:
    config = decoder("Llama").config
    torch.manual_seed(0)
    whole, results = Reporting(config).eval(), []
    cut = Reporting(config).eval()
    cut.load_state_dict(whole.state_dict())
    with torch.no_grad(), parallelize(cut, workers=groups(2)):
        for model in (whole, cut):
            report, table, scratch, pair = [0], {"old": 1}, torch.zeros(3), SlotData()
            for _ in range(2):
                model(prompt(5), report=report, table=table, scratch=scratch)
                model.fill(pair)
            assert table["report"] is report
            results.append((report, table, scratch.tolist(), pair))
    assert results[0] == results[1]


def append_length(append: Callable[[int], None], batch: int, ids: torch.Tensor) -> list[int]:
    append(len(ids))
    return [7]


def test_call_appends_by_the_method_of_a_list(whole, cut) -> None:
    for model in (whole, cut):
        seen: list[int] = []
        allowed = functools.partial(append_length, seen.append)
        model.generate(prompt(5), prefix_allowed_tokens_fn=allowed, **OPTIONS)
        assert seen == [5, 6, 7]


class Resizing(LlamaForCausalLM):
    """Resizes a tensor that its forward is given."""

    def forward(self, input_ids=None, scratch=None, **kwargs: Any) -> Any:
        scratch.resize_(3).fill_(2.0)
        return super().forward(input_ids=input_ids, **kwargs)


def test_call_resizes_a_tensor_given_to_it(groups) -> None:
    model, scratch = Resizing(decoder("Llama").config).eval(), torch.zeros(1)
    with parallelize(model, workers=groups(2)):
        model(prompt(5), scratch=scratch)
    assert scratch.tolist() == [2.0, 2.0, 2.0]


def test_what_cannot_come_home_is_refused_before(groups, cut) -> None:
    seen = []

    def stores_lock(processor: Any) -> None:
        processor.new = threading.Lock()

    class WithCache(Stepping):
        def __getstate__(self) -> dict[str, Any]:
            return {**vars(self), "x": None}

    with pytest.raises(ParallelError, match=r"Stepping.*cannot be copied"):
        cut.generate(prompt(5), logits_processor=[Stepping(0, stores_lock)], **OPTIONS)
    # generate runs its loop in this process instead, with the objects themselves
    processor = WithCache([1], lambda p: p.x.append(2))
    cut.generate(prompt(5), logits_processor=[processor, Stepping(seen, lambda p: p.x.append(1))], **OPTIONS)
    assert (processor.x, seen) == ([1, 2, 2, 2], [1, 1, 1])
    with pytest.raises(NotPortableError, match=r"threading|lock|Event"):
        cut(prompt(5), output_hidden_states=threading.Event())


class Flagged(StoppingCriteria):
    stop_all = False

    def __init__(self, stops: Callable[[Any], bool]) -> None:
        self.stop, self.seen, self.table, self.stops, self.event = False, 0, {"stop": False}, stops, None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen += 1
        time.sleep(0.02)
        return torch.full((len(input_ids),), bool(self.stops(self)))


_stop = False
_cell: list[bool] = []


def _by_global(criterion: Any) -> bool:
    return _stop


def _set_global() -> None:
    globals()["_stop"] = True


def _flags() -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Name → (whether to stop, what the other thread does)."""
    closed = False

    def close() -> None:
        nonlocal closed
        closed = True

    return {
        "attribute": (lambda c: c.stop, lambda c: setattr(c, "stop", True)),
        "dictionary": (lambda c: c.table["stop"], lambda c: c.table.update(stop=True)),
        "class": (lambda c: c.stop_all, lambda c: setattr(Flagged, "stop_all", True)),
        "closure": (lambda c: closed, lambda c: close()),
        "global": (_by_global, lambda c: _set_global()),
        "list": (lambda c: bool(_cell), lambda c: _cell.append(True)),
        "module": (lambda c: settings.stop, lambda c: setattr(settings, "stop", True)),
        "environment": (lambda c: os.environ.get("STOP") == "1", lambda c: os.environ.update(STOP="1")),
        "event": (lambda c: c.event.is_set(), lambda c: c.event.set()),
        "event of a module": (lambda c: settings.event.is_set(), lambda c: settings.event.set()),
    }


@pytest.mark.parametrize("batching", [False, True])
def test_flag_of_another_thread_stops_the_call(groups, batching: bool, caplog, monkeypatch) -> None:
    monkeypatch.setenv("STOP", "0")
    caplog.set_level(logging.ERROR, "parallelformers_ng")
    with parallelize(decoder("Llama"), workers=groups(2), batching=batching) as model:
        model.generate(prompt(5), stopping_criteria=[Flagged(lambda c: True)], **LONG)
        for name, (stops, act) in _flags().items():
            criterion = Flagged(stops)
            criterion.event = threading.Event() if name == "event" else None
            timer = threading.Timer(0.4, act, [criterion])
            timer.start()
            ids = model.generate(prompt(5), stopping_criteria=[criterion], **LONG)
            ended = time.monotonic()
            timer.join()
            assert 5 < ids.shape[1] - 5 < 60, name
            assert criterion.seen == ids.shape[1] - 5, name  # counted on the ranks, beside the flag of the same object
            assert time.monotonic() - ended < 5
    Flagged.stop_all = settings.stop = globals()["_stop"] = False
    _cell.clear()
    settings.event.clear()


def test_other_thread_wins_over_the_call(cut) -> None:
    criterion = Flagged(lambda c: c.seen > 1000)
    timer = threading.Timer(0.4, setattr, [criterion, "seen", 1000])
    timer.start()
    length = cut.generate(prompt(5), stopping_criteria=[criterion], **LONG).shape[1]
    timer.join()
    assert criterion.seen == 1001
    assert 5 < length - 5 < 60


def test_calls_that_write_globals_run_alone(groups) -> None:
    with parallelize(decoder("Llama"), workers=groups(2), batching=True) as model:
        settings.reset()
        options = {"prefix_allowed_tokens_fn": settings.noting, **OPTIONS}
        threads = [threading.Thread(target=model.generate, args=(prompt(5),), kwargs=options) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert settings.count == 9
