"""Tests that a parallelized model stays the program's object: its tensors, its own methods, and the code set on it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers as tf
from torch import nn

from parallelformers_ng import ParallelError, parallelize
from tests.zoo.build import build

pytestmark = pytest.mark.promise("the-model-object")

IDS = torch.tensor([[1, 5, 9, 33, 7, 48, 2]])


def tiny(cls: type = tf.LlamaForCausalLM, **config: Any) -> Any:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    return build(cls, tf.LlamaConfig(**{**sizes, "num_attention_heads": 4, "eos_token_id": None, **config}))


def step(model: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("tied", [False, True])
def test_optimizer_made_before_goes_on(groups, tied):
    model, plain, seen = tiny(tie_word_embeddings=tied), tiny(tie_word_embeddings=tied), []
    objects = [*model.parameters(), *model.buffers()]
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    plain.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    frozen.tag = "mine"
    model.lm_head.weight.register_hook(lambda gradient: seen.append("before"))
    observer = weakref.ref(model.model.norm.weight)
    optimizers = [torch.optim.SGD([{"params": each.parameters(), "lr": 0.1}]) for each in (model, plain)]
    torch.testing.assert_close(step(model, optimizers[0]), step(plain, optimizers[1]))
    with parallelize(model, workers=groups(2)):
        assert [*map(id, (*model.parameters(), *model.buffers()))] == [*map(id, objects)]
        assert frozen.tag == "mine"
        assert model.model.norm.weight.grad is not None
        frozen.later = "also mine"
        removed = model.lm_head.weight.register_hook(lambda gradient: seen.append("removed"))
        model.model.norm.weight.register_hook(lambda gradient: seen.append("meanwhile"))
        removed.remove()
        with pytest.raises(ParallelError, match="on the workers"):
            optimizers[0].step()
    assert [*map(id, (*model.parameters(), *model.buffers()))] == [*map(id, objects)]
    assert vars(frozen) == {"tag": "mine", "later": "also mine"}
    assert observer() is model.model.norm.weight
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    torch.testing.assert_close(step(model, optimizers[0]), step(plain, optimizers[1]))
    assert [seen.count(each) for each in ("before", "meanwhile", "removed")] == [2, 1, 0]
    assert frozen.grad is None
    assert not frozen.requires_grad
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_graph_from_before_is_valid_afterwards(groups):
    model, plain = tiny(), tiny()
    loss = model(IDS, labels=IDS).loss
    with parallelize(model, workers=groups(2)):
        model.zero_grad()
        model.model.norm.requires_grad_(False)
    loss.backward()
    plain(IDS, labels=IDS).loss.backward()
    assert not model.model.norm.weight.requires_grad
    torch.testing.assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad)


def test_gradients_that_are_cleared_meanwhile_stay_cleared(groups):
    model = tiny()
    model(IDS, labels=IDS).loss.backward()
    with parallelize(model, workers=groups(2)):
        model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_leave_memory_and_come_back(groups):
    model = tiny()
    storage = weakref.ref(model.lm_head.weight.untyped_storage())
    with parallelize(model, workers=groups(2)):
        assert storage() is None
    assert type(model.lm_head.weight) is nn.Parameter


def test_failed_parallelize_keeps_the_tensors(groups, monkeypatch):
    model = tiny()
    objects = [*model.parameters()]
    want = model(IDS).logits
    monkeypatch.setattr("parallelformers_ng.model.groups.StoredModel.load", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        parallelize(model, workers=groups(2))
    monkeypatch.undo()
    assert [*map(id, model.parameters())] == [*map(id, objects)]
    torch.testing.assert_close(model(IDS).logits, want)


def test_change_through_older_tensor_is_refused_and_kept(groups):
    model, plain = tiny(), tiny()
    state, state_of_plain = model.state_dict(), plain.state_dict()
    with parallelize(model, workers=groups(2)):
        torch.testing.assert_close(model(IDS).logits, plain(IDS).logits)
        state["model.norm.weight"].mul_(2)
        state_of_plain["model.norm.weight"].mul_(2)
        with pytest.raises(ParallelError, match=r"model\.norm\.weight was changed .* Call deparallelize\(\)"):
            model(IDS)
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits)
    assert state["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()


class OwnGenerate(tf.LlamaForCausalLM):
    def generate(self, input_ids, seed=3, streamer="none", **options):
        timeout = options.pop("timeout", 2)
        for _ in range(3):
            tokens = self(input_ids=input_ids, use_cache=False).logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, (tokens + seed * timeout + len(str(streamer))) % 50], 1)
        return input_ids


class Passing(tf.LlamaForCausalLM):
    def generate(self, input_ids, streamer=None, **options):
        return super().generate(input_ids, streamer=streamer, **options)


class OwnNames(tf.LlamaForCausalLM):
    device = property(lambda self: torch.device("cpu", 0))
    shard_plan = "my plan"

    def agenerate(self, ids):
        return self(input_ids=ids).logits.argmax(-1)

    def memory_allocated(self, what):
        return f"my {what}"

    def __enter__(self):
        return "entered"

    def __exit__(self, *error):
        self.left = True

    def __repr__(self):
        return "my repr"

    def to(self, *args):
        self.moved = args
        return self

    def state_dict(self):
        return {"norm": super().state_dict()["model.norm.weight"]}


OWN_CALLS: dict[str, Callable[[Any], Any]] = {
    "default": lambda m: m.generate(IDS),
    "seed": lambda m: m.generate(IDS, seed=5),
    "positional seed": lambda m: m.generate(IDS, 5),
    "timeout": lambda m: m.generate(IDS, timeout=7),
    "streamer": lambda m: m.generate(IDS, streamer="abcdef"),
    "no streamer": lambda m: m.generate(IDS, streamer=None),
    "awaited": lambda m: asyncio.run(m.agenerate(IDS, seed=0)) if hasattr(m, "agenerate") else m.generate(IDS, seed=0),
}


def test_own_generate_takes_its_own_options(groups):
    plain = tiny(OwnGenerate)
    with torch.no_grad(), parallelize(tiny(OwnGenerate), workers=groups(2)) as model:
        for name, call in OWN_CALLS.items():
            assert torch.equal(call(model), call(plain)), name


def test_own_generate_passes_options_of_the_library(groups):
    class Streamer:
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append("end")

    options = {"max_new_tokens": 4, "pad_token_id": 0}
    with parallelize(tiny(Passing), workers=groups(2)) as model:
        streamer = Streamer()
        ids = model.generate(IDS, streamer=streamer, timeout=60, **options)
        assert streamer.tokens == [*ids[0].tolist(), "end"]
        sampled = [model.generate(IDS, do_sample=True, seed=seed, **options) for seed in (1, 1, 2)]
        assert torch.equal(sampled[0], sampled[1])
        assert not torch.equal(sampled[0], sampled[2])
        assert torch.equal(asyncio.run(model.agenerate(IDS, **options)), ids)


def test_names_of_the_class_come_first(groups):
    plain, model = tiny(OwnNames), parallelize(tiny(OwnNames), workers=groups(2))
    with torch.no_grad():
        for each in (model, plain):
            with each as entered:
                assert entered == "entered"
            assert each.left
            assert each.to("meta") is each
            assert each.moved == ("meta",)
            assert (each.memory_allocated("memory"), each.shard_plan, repr(each)) == ("my memory", "my plan", "my repr")
            assert each.device == torch.device("cpu", 0)
        assert torch.equal(model.agenerate(IDS), plain.agenerate(IDS))
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
    model.deparallelize()
    assert type(model) is OwnNames


class Helping(tf.LlamaForCausalLM):
    sign = 1.0

    def helper(self, logits):
        return logits * self.sign

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.helper(output.logits)
        return output

    def stream(self, ids, steps=3):
        for _ in range(steps):
            ids = torch.cat([ids, self(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
            yield ids

    async def answer(self, ids):
        await asyncio.sleep(0)
        return self(input_ids=ids).logits

    async def answers(self, ids):
        for each in self.stream(ids):
            await asyncio.sleep(0)
            yield each

    @contextlib.contextmanager
    def scaled(self, sign):
        before, self.sign = self.sign, sign
        try:
            yield self
        finally:
            self.sign = before

    def lazily(self, ids):
        return (self(input_ids=ids[:, :length]).logits.argmax(-1) for length in range(1, 4))

    def mapped(self, ids):
        return map(lambda length: self(input_ids=ids[:, :length]).logits.argmax(-1), range(1, 4))  # noqa: C417


async def collected(answers):
    return [each async for each in answers]


def within(model):
    with model.scaled(-1.0) as same:
        assert same is model
        return model(IDS).logits


LAZY: dict[str, Callable[[Any], Any]] = {
    "generator": lambda m: [*m.stream(IDS)],
    "part of a generator": lambda m: next(m.stream(IDS)),
    "coroutine": lambda m: asyncio.run(m.answer(IDS)),
    "async generator": lambda m: asyncio.run(collected(m.answers(IDS))),
    "context manager": within,
    "generator expression": lambda m: [*m.lazily(IDS)],
    "map": lambda m: [*m.mapped(IDS)],
    "after the context": lambda m: m(IDS).logits,
}


@pytest.fixture(scope="module")
def helping(groups) -> Iterator[Any]:
    with torch.no_grad(), parallelize(tiny(Helping), workers=groups(2)) as model:
        yield model


@pytest.mark.parametrize("call", LAZY)
def test_lazy_methods_run_in_the_caller(helping, call):
    torch.testing.assert_close(LAZY[call](helping), LAZY[call](tiny(Helping)))


def negative(self, logits):
    return -logits


def shifted(self, input_ids, **kwargs):
    inputs = type(self).prepare_inputs_for_generation(self, input_ids, **kwargs)
    inputs["input_ids"] = (inputs["input_ids"] + 1) % 50
    return inputs


SET: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "own helper": ("helper", lambda m: types.MethodType(negative, m)),
    "function": ("helper", lambda m: lambda logits: -logits),
    "method of transformers": ("prepare_inputs_for_generation", lambda m: types.MethodType(shifted, m)),
    "private method": ("_get_logits_processor", lambda m: lambda *args, **kwargs: tf.LogitsProcessorList()),
    "function of a layer": ("model.layers.0.self_attn.forward", lambda m: lambda x: x),
}


@pytest.mark.parametrize("case", SET)
def test_methods_set_later_are_refused_by_name(helping, case):
    path, make = SET[case]
    owner, _, name = path.rpartition(".")
    module = helping.get_submodule(owner)
    before = getattr(module, name)
    with pytest.raises(ParallelError, match=rf"setting {name}: .*Call deparallelize"):
        setattr(module, name, make(helping))
    assert getattr(module, name) == before


def test_methods_set_before_are_used_not_deleted(groups):
    model, plain = tiny(Helping), tiny(Helping)
    for each in (model, plain):
        each.helper = types.MethodType(negative, each)
        each.prepare_inputs_for_generation = types.MethodType(shifted, each)
    with torch.no_grad(), parallelize(model, workers=groups(2)):
        torch.testing.assert_close(model(IDS).logits, plain(IDS).logits)
        options = {"max_new_tokens": 4, "pad_token_id": 0}
        assert torch.equal(model.generate(IDS, **options), plain.generate(IDS, **options))
        with pytest.raises(ParallelError, match="deleting helper"):
            del model.helper
    assert model.helper.__self__ is model


def test_functions_of_libraries_may_be_set(helping):
    helping.describe = lambda: "mine"
    assert helping.describe() == "mine"
    del helping.describe
    usual = helping.generate
    helping.generate = lambda *args, **kwargs: usual(*args, **{"max_new_tokens": 2, "pad_token_id": 0, **kwargs})
    assert helping.generate(IDS).shape == (1, 9)
    del helping.generate
    helping.helper = torch.neg
    torch.testing.assert_close(helping(IDS).logits, -tiny(Helping)(IDS).logits)
    del helping.helper


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda weight: weight.mul_(2),
    "item": lambda weight: weight.__setitem__(0, 1.0),
    "view": lambda weight: weight.view(-1)[1:].zero_(),
    "data": lambda weight: weight.data.mul_(2),
    "detached": lambda weight: weight.detach().copy_(weight + 1),
    "out": lambda weight: torch.add(weight, 1, out=weight),
    "many": lambda weight: torch._foreach_mul_([weight], 2),
    "initialized": nn.init.zeros_,
    "numpy": lambda weight: weight.detach().numpy().fill(1),
    "view in numpy": lambda weight: np.asarray(weight.detach()).T.fill(1),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()).zero_(),
}
WEIGHTS: dict[str, Callable[[Any], torch.Tensor]] = {
    "entry": lambda m: m.state_dict()["model.norm.weight"],
    "entry with variables": lambda m: m.state_dict(keep_vars=True)["model.norm.weight"],
    "parameter": lambda m: m.model.norm.weight,
}


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("write", WRITES)
def test_change_of_a_weight_is_refused(helping, weight, write):
    words = "on the workers|gathered from the workers|read-only"
    with torch.no_grad():
        tensor = WEIGHTS[weight](helping)
        with pytest.raises((ParallelError, ValueError), match=words):
            WRITES[write](tensor)
        with pytest.raises((ParallelError, ValueError), match=words), torch.inference_mode():
            WRITES[write](tensor)
    torch.testing.assert_close(helping(IDS).logits, tiny(Helping)(IDS).logits)


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def loaded(state, assign):
    model = tiny(Helping, tie_word_embeddings=False)
    model.load_state_dict(state, assign=assign)
    step(model, torch.optim.SGD(model.parameters(), lr=0.0))
    return dict(model.named_parameters())


READS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "deep copies": copy.deepcopy,
    "a file": through_file,
    "safetensors": lambda state: safetensors.torch.load(safetensors.torch.save(state)),
    "clones": lambda state: {name: tensor.clone() for name, tensor in state.items()},
    "sums": lambda state: {name: tensor + 0 for name, tensor in state.items()},
    "stacks": lambda state: {name: torch.stack([tensor])[0] for name, tensor in state.items()},
    "arrays": lambda state: {name: torch.from_numpy(np.array(tensor)) for name, tensor in state.items()},
    "parameters": lambda state: {name: nn.Parameter(tensor) for name, tensor in state.items()},
    "another model": lambda state: loaded(state, assign=False),
    "assigned": lambda state: loaded(state, assign=True),
}


@pytest.mark.parametrize("read", READS)
def test_state_dict_is_read_like_any_other(helping, read):
    state, want = helping.state_dict(), tiny(Helping).state_dict()
    with torch.enable_grad():
        got = READS[read](state)
    assert {type(tensor) for tensor in got.values()} <= {torch.Tensor, nn.Parameter}
    assert all(torch.equal(state[name], want[name]) for name in want)
    torch.testing.assert_close({name: tensor.detach() for name, tensor in got.items()}, dict(want))
    with torch.no_grad():
        for tensor in got.values():
            tensor.zero_()


def test_parameters_can_be_copied_together(helping):
    copies, want = copy.deepcopy([*helping.parameters()]), [*tiny(Helping).parameters()]
    assert all(map(torch.equal, copies, want))


class Holder:
    def __init__(self):
        self.layer = nn.Linear(50, 50)


class Listed(tf.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.listed = [nn.Linear(50, 50)]
        self.held = {"a": Holder()}
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(50))])

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.held["a"].layer(self.listed[0](output.logits)) * self.scale[0]
        return output


OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "in place": lambda m: m.listed[0].weight.mul_(2),
    "data": lambda m: m.listed[0].weight.data.mul_(2),
    "numpy": lambda m: m.listed[0].bias.detach().numpy().fill(3),
    "object": lambda m: m.held["a"].layer.bias.data.add_(1),
    "new layer": lambda m: setattr(m, "listed", [nn.Linear(50, 50, bias=False).requires_grad_(False).apply(filled)]),
    "in the new layer": lambda m: m.listed[0].weight.data.mul_(0.5),
}


def filled(layer):
    layer.weight.data.copy_(torch.linspace(-1, 1, 2500).view(50, 50))


def test_weights_outside_of_tables_are_followed(groups):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(tiny(Listed))
    models[1].listed, models[1].held = copy.deepcopy((models[0].listed, models[0].held))
    model, plain = models
    with torch.no_grad(), parallelize(model, workers=groups(2)):
        for write in OUTSIDE.values():
            write(model)
            write(plain)
            torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, atol=1e-3, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, atol=1e-3, rtol=1e-4)
