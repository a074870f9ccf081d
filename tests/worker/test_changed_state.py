"""Tests that what a model's code changes in the model during a call is the model's state, as in one process."""

from __future__ import annotations

import enum
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from parallelformers_ng import parallelize
from parallelformers_ng.errors import GroupError, ParallelError, StateLostError
from parallelformers_ng.model.parallelized import deployment_of
from tests.helpers.patience import await_incarnation, kill

pytestmark = pytest.mark.promise("state")
IDS = torch.tensor([[1, 5, 9, 33]])
KEPT = (
    "steps", "history", "seen", "last", "plain", "stats", "queue", "total", "count", "ema", "grown", "lazy", "scale",
    "unseen", "halved",
)  # fmt: skip


def halve(tensor: torch.Tensor) -> torch.Tensor:
    """Change a tensor without a new version, and return the same object."""
    tensor.data.mul_(0.5)
    return tensor


class Stats:
    def __init__(self) -> None:
        self.calls, self.log = 0, list[int]()

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)


class Noting(LlamaForCausalLM):
    """A model that changes all kinds of state in each forward, and whose output depends on them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps, self.history, self.seen, self.last = 0, [], {}, None
        self.plain, self.stats, self.queue, self.halved = torch.ones(3), Stats(), deque(maxlen=2), torch.ones(2)
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("count", torch.zeros(2), persistent=False)
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("grown", torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, *args: Any, fail: bool = False, **kwargs: Any) -> Any:
        self.steps += 1
        self.total.add_(1.5)
        self.count = self.count + 1
        self.ema.data.copy_(self.ema * 0.5 + 1)  # without a new version
        self.grown = torch.cat([self.grown, torch.full((1, 3), float(self.steps))])
        if not hasattr(self, "lazy"):
            self.register_buffer("lazy", torch.zeros(3))
        output = super().forward(*args, **kwargs)
        self.history.append(self.steps)
        if fail:
            raise ValueError("in the middle")
        self.seen[self.steps] = float(self.total)
        self.last = output.logits[:, -1].clone()
        self.plain.mul_(2)
        self.halved = halve(self.halved)
        self.stats.calls += 1
        self.stats.log.append(self.steps)
        self.queue.append(self.steps)
        self.lazy += 1
        self.scale.mul_(1.25)
        vars(self)["unseen"] = self.steps
        self.config.problem_type = f"after {self.steps}"
        state = (self.plain, self.lazy, self.total, self.ema, self.grown, self.scale)
        output.logits = output.logits + self.steps + sum(tensor.sum() for tensor in state)
        return output


def llama(cls: Any = Noting) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return cls(LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=None, pad_token_id=0)).eval()


def is_equal(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    return type(got) is type(want) and got == want


def assert_same_state(model: Any, plain: Any, names: tuple[str, ...] = KEPT) -> None:
    with torch.no_grad():
        for name in names:
            assert is_equal(getattr(model, name), getattr(plain, name)), name
        got, want = model.state_dict(), plain.state_dict()
    assert sorted(got) == sorted(want)
    for name in want:
        assert is_equal(got[name], want[name]), name
    assert model.config.problem_type == plain.config.problem_type


def assert_same_call(model: Any, plain: Any, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        assert is_equal(model(*args, **kwargs)[0], plain(*args, **kwargs)[0])


def kill_and_wait(model: Any) -> None:
    deployment = deployment_of(model)
    before = deployment.incarnation
    kill(deployment.pids[-1])
    await_incarnation(model, before + 1)


def alone(model: Any, ranks: int = 2, **workers: Any) -> Any:
    """Parallelize over workers of its own, which are replaced after a death."""
    return parallelize(model, ranks, workers={"device": "cpu", **workers})


def test_every_kind_of_state_comes_home(groups, tmp_path: Path) -> None:
    plain, model = llama(), llama()
    history, total = model.history, None
    parallelize(model, workers=groups(2))
    for _ in range(2):
        assert_same_call(model, plain, IDS)
        assert_same_state(model, plain)
        assert total is None or total == 1.5  # a state dict is a snapshot
        total = model.state_dict()["total"]
    settings = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(IDS, **settings), plain.generate(IDS, **settings))
    assert_same_state(model, plain)
    assert model.history is history  # changed, not replaced
    model.steps = plain.steps = 100
    assert_same_call(model, plain, IDS)
    assert_same_state(model, plain)
    model.save_pretrained(tmp_path)
    saved, want = load_file(tmp_path / "model.safetensors"), plain.state_dict()
    assert sorted(saved) == sorted(want)
    assert all(is_equal(saved[name], want[name]) for name in want)
    model.deparallelize()
    assert_same_state(model, plain)
    assert_same_call(model, plain, IDS)
    assert_same_state(model, plain)


def test_state_of_a_failed_call_is_kept(groups) -> None:
    plain, model = llama(), llama()
    with parallelize(model, workers=groups(2)):
        for _ in range(2):
            assert_same_call(model, plain, IDS)
            for each in (model, plain):
                with pytest.raises(ValueError, match="in the middle"), torch.no_grad():
                    each(IDS, fail=True)
            assert_same_state(model, plain)


def test_new_workers_start_from_the_newest_state() -> None:
    plain, model = llama(), alone(llama())
    with model:
        assert_same_call(model, plain, IDS)
        kill_and_wait(model)
        assert_same_state(model, plain)
        assert_same_call(model, plain, IDS)
        assert_same_state(model, plain)


class Slow(Noting):
    def forward(self, *args: Any, slow: str = "", **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if slow:
            Path(slow).touch()
            threading.Event().wait(60)
        return output


def test_call_that_dies_has_changed_nothing(tmp_path: Path) -> None:
    plain, model = llama(Slow), alone(llama(Slow))
    begun = tmp_path / "begun"

    def kill_later() -> None:
        while not begun.exists():
            pass
        os.kill(deployment_of(model).pids[-1], signal.SIGKILL)

    with model:
        assert_same_call(model, plain, IDS)
        killer = threading.Thread(target=kill_later)
        killer.start()
        with pytest.raises(GroupError):
            model(IDS, slow=str(begun))
        killer.join()
        assert_same_state(model, plain)
        assert_same_call(model, plain, IDS)
        assert_same_state(model, plain)


def test_replicas_share_the_state() -> None:
    plain, model = llama(), alone(llama(), 1, replicas=2)
    with model:
        for _ in range(2):
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda _: model(IDS), range(5)))
            for _ in range(5):
                plain(IDS)
            assert_same_state(model, plain)
            kill_and_wait(model)


def test_concurrent_generates_count_each_forward(groups) -> None:
    plain, model = llama(), llama()
    settings = {"max_new_tokens": 3, "do_sample": False}
    with parallelize(model, workers=groups(2)), ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: model.generate(IDS, **settings), range(4)))
        for _ in range(4):
            plain.generate(IDS, **settings)
        assert_same_state(model, plain)


def resnet() -> Any:
    torch.manual_seed(0)
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 24], "depths": [1, 1], "num_labels": 3}
    return ResNetForImageClassification(ResNetConfig(**sizes)).eval()


@pytest.mark.parametrize("source", ["model", "path"])
def test_statistics_of_batch_norms(source: str, tmp_path: Path) -> None:
    plain = resnet()
    plain.save_pretrained(tmp_path)
    model = alone(resnet() if source == "model" else str(tmp_path))
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)) + 1
    with model:
        for each in (model, plain):
            each.train()
        for _ in range(2):
            assert_same_call(model, plain, pixels)
        for each in (model, plain):
            each.eval()
        assert_same_state(model, plain, ())
        kill_and_wait(model)
        assert_same_call(model, plain, pixels)
        assert_same_state(model, plain, ())
    assert_same_call(model, plain, pixels)


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_labels": 1}
    return BertForSequenceClassification(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)).eval()


def test_configuration_that_a_stock_model_sets() -> None:
    plain, model = bert(), alone(bert())
    with model:
        assert_same_call(model, plain, IDS, labels=torch.tensor([0.5]))
        assert model.config.problem_type == plain.config.problem_type == "regression"
        kill_and_wait(model)
        assert_same_call(model, plain, IDS, labels=torch.tensor([1.5]))
    assert model.config.problem_type == "regression"


class Renormalizing(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens = nn.Embedding(99, 64, max_norm=0.5)


class Gate(nn.Module):
    """A user's module between the stock layers."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.calls = mlp, 0
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.newest = hidden
        self.mean.lerp_(hidden.mean((0, 1)), 0.1)
        return self.mlp(hidden) + self.mean * self.calls


class Gated(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Gate(layer.mlp)


class Spectral(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra = nn.utils.parametrizations.spectral_norm(nn.Linear(99, 5))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = self.extra(output.logits)
        return output


class OldSpectral(Spectral):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra = nn.utils.spectral_norm(nn.Linear(99, 5))


@pytest.mark.parametrize("cls", [Renormalizing, Gated, Spectral, OldSpectral])
def test_layers_that_change_themselves(cls: Any, groups) -> None:
    plain, model = llama(cls), llama(cls)
    with parallelize(model, workers=groups(2)):
        for each in (model, plain):
            each.train()
        for shift in range(2):
            assert_same_call(model, plain, IDS + shift)
            assert_same_state(model, plain, ())
        if cls is Gated:
            got, want = model.model.layers[1].mlp, plain.model.layers[1].mlp
            assert got.calls == want.calls == 2
            assert is_equal(got.newest, want.newest)
    assert_same_state(model, plain, ())
    assert_same_call(model, plain, IDS)


class Locking(LlamaForCausalLM):
    """A model with state that no other process can have."""

    lock: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.lock is None:
            self.lock = threading.Lock()
        with self.lock:
            return super().forward(*args, **kwargs)


@pytest.mark.parametrize("accept", [lambda m: m.accept_lost_state(), lambda m: setattr(m, "lock", None)])
def test_calls_raise_until_lost_state_is_accepted(accept: Callable[[Any], None]) -> None:
    plain, model = llama(Locking), alone(llama(Locking), 1)
    with model:
        assert_same_call(model, plain, IDS)
        with pytest.raises(ParallelError, match="lock is only on the workers"):
            model.lock.acquire()
        kill_and_wait(model)
        for _ in range(2):
            with pytest.raises(StateLostError, match=r"lost: lock \(the workers have ended"):
                model(IDS)
        accept(model)
        assert_same_call(model, plain, IDS)


class Scratch(LlamaMLP):
    """A layer that is cut, and keeps its shard only within a call."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.inner = self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)
        return self.down_proj(self.inner)


class Averaging(LlamaMLP):
    """A layer that is cut, and whose next call depends on its shard of the state."""

    inner = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shard = self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)
        if self.inner is not None:
            shard = shard * (1 + 1e-6 * self.inner)  # too little for the comparison with a whole twin
        self.inner = shard.mean()
        return self.down_proj(shard)


def with_mlp(mlp: Any) -> Any:
    class Whole(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp = mlp(config)

    return llama(Whole)


@pytest.mark.parametrize("mlp", [Scratch, Averaging])
def test_state_that_differs_is_refused_when_read(mlp: Any, groups) -> None:
    plain, model = with_mlp(mlp), with_mlp(mlp)
    with parallelize(model, workers=groups(2)):
        assert model.shard_plan.tensors["model.layers.0.mlp.up_proj.weight"].shards[0].dim is not None
        assert_same_call(model, plain, IDS)
        with pytest.raises(ParallelError, match="each worker has a different value"):
            model.model.layers[0].mlp.inner.sum()
        if mlp is Scratch:
            assert_same_call(model, plain, IDS)
        else:
            with pytest.raises(ParallelError, match="each worker has a different value"):
                model(IDS)


class Unlike(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("number", torch.zeros(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.number.fill_(os.getpid())
        return super().forward(*args, **kwargs)


def test_buffer_that_differs_between_ranks_is_found(groups) -> None:
    with parallelize(llama(Unlike), workers=groups(2)) as model:
        for _ in range(2):
            with pytest.raises(StateLostError, match=r"number .*different values"):
                model(IDS)
        model.accept_lost_state()
        assert model.number > 0


def test_stock_models_report_nothing(groups) -> None:
    with parallelize(llama(LlamaForCausalLM), workers=groups(2)) as model:
        model(IDS)
        model.generate(IDS, max_new_tokens=3, do_sample=False)
        assert not deployment_of(model).state.is_changed
        assert deployment_of(model).replicas[0].group.call_each("state_changes", [()]) == [None, None]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Holding(LlamaForCausalLM):
    """A model that changes an array, an object with slots and a member of an enumeration."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.array, self.slotted, self.color = np.zeros(4), Slotted(), Color.RED

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.array[1] += 1
        self.slotted.count += 1
        self.color = Color.BLUE if self.color is Color.RED else Color.RED
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + float(self.array.sum()) + self.slotted.count * self.color.value
        return output


def test_objects_keep_their_identity(groups) -> None:
    plain, model = llama(Holding), llama(Holding)
    array, slotted = model.array, model.slotted
    with parallelize(model, workers=groups(2)):
        for value in (0, 5, 7):
            plain.array[0] = array[0] = value
            assert_same_call(model, plain, IDS)
            model.generate(IDS, max_new_tokens=3, do_sample=False)
            plain.generate(IDS, max_new_tokens=3, do_sample=False)
        assert model.array is array
        assert model.slotted is slotted
        assert model.color is plain.color
        assert (array.tolist(), slotted.count) == (plain.array.tolist(), plain.slotted.count)
    assert [member.name for member in Color] == ["RED", "BLUE"]
    assert_same_call(model, plain, IDS)


class Lazy(LlamaForCausalLM):
    """A model whose forward makes a table in an attribute, and reads it."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        if not hasattr(self, "table"):
            self.table: dict[int, torch.Tensor] = {}
        scale = self.table.setdefault(input_ids.shape[1], torch.full((1,), 2.0))
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = output.logits * scale
        return output


def test_program_changes_what_a_call_has_made(groups) -> None:
    plain, model = llama(Lazy), llama(Lazy)
    with torch.no_grad(), parallelize(model, workers=groups(2)):
        for change in (
            lambda each: None,
            lambda each: each.table.update({4: torch.full((1,), 3.0)}),
            lambda each: each.table[4].mul_(5),
            lambda each: each.table.clear(),
        ):
            for each in (plain, model):
                if hasattr(each, "table"):
                    change(each)
            assert torch.allclose(model(IDS).logits, plain(IDS).logits, atol=1e-3)
            assert is_equal(model.table[4], plain.table[4])
