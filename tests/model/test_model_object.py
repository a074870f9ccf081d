"""Tests that a parallelized model stays the program's object: its tensors, its own methods, and the code set on it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
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
        assert frozen.tag == "mine" and model.model.norm.weight.grad is not None
        frozen.later = "also mine"
        removed = model.lm_head.weight.register_hook(lambda gradient: seen.append("removed"))
        model.model.norm.weight.register_hook(lambda gradient: seen.append("meanwhile"))
        removed.remove()
        with pytest.raises(ParallelError, match="on the workers"):
            optimizers[0].step()
    assert [*map(id, (*model.parameters(), *model.buffers()))] == [*map(id, objects)]
    assert vars(frozen) == {"tag": "mine", "later": "also mine"}
    assert observer() is model.model.norm.weight and {type(each) for each in model.parameters()} == {nn.Parameter}
    torch.testing.assert_close(step(model, optimizers[0]), step(plain, optimizers[1]))
    assert seen.count("before") == 2 and seen.count("meanwhile") == 1 and "removed" not in seen
    assert frozen.grad is None and not frozen.requires_grad
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


def test_weights_of_a_model_leave_memory_and_come_back(groups):
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


def test_change_through_shared_memory_from_before_is_refused_and_kept(groups):
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
